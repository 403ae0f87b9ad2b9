"""Statuses and logged decisions in the controller's HTTP API, for its server and its clients."""

from __future__ import annotations

import msgspec

from policy.engine.capacity import Capability
from policy.scaling.situation import Decision, Override, Situation


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model as the controller sees it; ``phase`` says what it is doing and ``note`` why.

    ``decided_by`` is the policy, or ``by hand``: then ``override`` has what was set, and until when. Of the
    last decision the ``reason``, what one replica was taken to be capable of, the ``forecast`` rate in
    requests per second, and whether it was only logged (``dry_run``). ``barred`` are the modes that failed,
    and until when (Unix seconds) load does not switch to each.
    """

    name: str
    engine: str
    mode: str
    shape: str
    generation: int
    target: int
    ready: int
    phase: str
    note: str = ""
    decided_by: str = ""
    override: Override | None = None
    decided_at: float | None = None
    reason: str = ""
    capability: Capability | None = None
    forecast: float | None = None
    dry_run: bool = False
    barred: dict[str, float] = {}


class SwitchOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """What a switch that load made promised and what was measured since, as parts of the cost before.

    ``decided_at`` is the instant of its decision; ``met_before`` and ``met`` are the parts of the requests
    that were within the objective.
    """

    at: float
    model: str
    decided_at: float = 0.0
    was: str
    mode: str
    promised: float
    measured: float
    met_before: float
    met: float


class LoggedDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, and all that it was made of but for what policies remember.

    Of a switch that load made, ``outcome`` is what was measured once it had been there for a while.
    """

    situation: Situation
    decision: Decision
    outcome: SwitchOutcome | None = None


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's own view: which actuator, since when, each model, the last events."""

    actuator: str
    epoch: float
    pid: int
    models: tuple[ModelStatus, ...]
    events: tuple[str, ...] = ()
