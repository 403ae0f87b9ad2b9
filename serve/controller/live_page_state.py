"""The state of all models at an instant, as the page shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from policy.config.control import SloConfig
from policy.config.deployment import ResourceBudget
from policy.scaling.decision_types import Decision, ModeOption, Situation
from policy.scaling.view import Supply
from policy.signals.types import Signals
from policy.types import Replica
from policy.wire.controller_reports import GatewayReport, WaitingRequests, WorkerDetail
from serve.controller_api_schema import ControllerStatus, ModelStatus

# Workers report details for this long after they were last read, and a report counts for this long.
WATCHED_S = 10.0
MAX_ROUTES = 100


class LiveModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model: its status, and the input and the proposals of the last decision, if there is one."""

    status: ModelStatus
    modes: tuple[ModeOption, ...] = ()
    slo: SloConfig = SloConfig()
    signals: Signals = Signals()
    supply: Supply = Supply()
    proposed: int | None = None
    shadow: int | None = None
    others: dict[str, int] = {}


class LiveState(msgspec.Struct, frozen=True, kw_only=True):
    """All models at the instant ``at`` (Unix seconds) of the controller that started at ``epoch``.

    ``waiting`` and ``routes`` are of all gateway workers: empty for the first two seconds in which somebody
    reads this. ``routes`` are the last ones, the newest first, as in `/admin/routes`.
    """

    at: float
    epoch: float
    actuator: str
    models: tuple[LiveModel, ...]
    replicas: tuple[Replica, ...]
    budget: ResourceBudget
    events: tuple[str, ...] = ()
    waiting: tuple[WaitingRequests, ...] = ()
    routes: tuple[dict[str, Any], ...] = ()


@dataclass(eq=False)
class GatewayWorkerDetails:
    """The details that gateway workers report while somebody reads them. Instants are of one clock."""

    _read_at: float = -WATCHED_S
    _by_worker: dict[str, tuple[float, WorkerDetail]] = field(default_factory=dict)

    def take(self, report: GatewayReport, at: float) -> bool:
        """Take a report; returns whether its worker is to report details."""
        if report.last or report.detail is None:
            self._by_worker.pop(report.worker, None)
        else:
            self._by_worker[report.worker] = at, report.detail
        return at - self._read_at < WATCHED_S

    def read(self, at: float) -> tuple[tuple[WaitingRequests, ...], tuple[dict[str, Any], ...]]:
        """What waits, and the last routes, the newest first; workers report them from now on."""
        self._read_at = at
        fresh = [detail for taken_at, detail in self._by_worker.values() if at - taken_at < WATCHED_S]
        counts: dict[tuple[str, str, str], WaitingRequests] = {}
        for each in (waiting for detail in fresh for waiting in detail.waiting):
            key = (each.model, each.priority, each.tenant)
            before = counts[key].requests if key in counts else 0
            counts[key] = msgspec.structs.replace(each, requests=before + each.requests)
        routes = sorted((route for detail in fresh for route in detail.routes), key=_at, reverse=True)
        return tuple(counts.values()), tuple(routes[:MAX_ROUTES])


def _at(route: dict[str, Any]) -> float:
    return float(route["at"])


def live_state(
    status: ControllerStatus,
    replicas: tuple[Replica, ...],
    *,
    decisions: Mapping[str, Decision],
    situations: Mapping[str, Situation],
    budget: ResourceBudget,
    details: GatewayWorkerDetails,
    at: float,
    now: float,
) -> LiveState:
    """The state at ``at``, which is ``now`` by the clock of ``details``."""
    waiting, routes = details.read(now)
    return LiveState(
        at=at,
        epoch=status.epoch,
        actuator=status.actuator,
        models=tuple(
            _model(model, decisions.get(model.name), situations.get(model.name)) for model in status.models
        ),
        replicas=replicas,
        budget=budget,
        events=status.events,
        waiting=waiting,
        routes=routes,
    )


def _model(status: ModelStatus, decision: Decision | None, situation: Situation | None) -> LiveModel:
    if decision is None or situation is None:
        return LiveModel(status=status)
    return LiveModel(
        status=status,
        modes=situation.mode_options,
        slo=situation.slo,
        signals=situation.signals,
        supply=situation.supply,
        proposed=decision.proposal.count,
        shadow=None if decision.shadow is None else decision.shadow.count,
        others=decision.others,
    )
