"""Statuses and logged decisions of the controller's HTTP API, for server and clients."""

from __future__ import annotations

import msgspec

from policy.engine.replica_capacity import Capability
from policy.scaling.decision_types import Decision, ModeOverride, Situation


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a model: its ``phase``, and in ``note`` the reason for it.

    ``decided_by`` is the policy, or ``by hand`` with an ``override``. ``reason``, ``capability`` of one
    replica, ``forecast`` (requests per second) and ``dry_run`` (only logged) are of the last decision.
    While it is ``resolving``, the weights of the revision are read, which may make a new one.
    ``barred`` maps modes that failed to the instant (Unix seconds) until which load does not switch to them.
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
    resolving: bool = False
    decided_by: str = ""
    override: ModeOverride | None = None
    decided_at: float | None = None
    reason: str = ""
    capability: Capability | None = None
    forecast: float | None = None
    dry_run: bool = False
    barred: dict[str, float] = {}


class SwitchOutcome(msgspec.Struct, frozen=True, kw_only=True, tag="outcome"):
    """The predicted and the measured saving of an automatic switch, as fractions of the cost before.

    ``decided_at`` is the instant of its decision; ``met_before`` and ``met`` are the fractions of requests
    within the SLO.
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
    """A decision and its input, without the memory of policies.

    ``outcome`` is what was measured some time after an automatic switch.
    """

    situation: Situation
    decision: Decision
    outcome: SwitchOutcome | None = None


class ControllerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's status: actuator, start (``epoch``), models and recent events."""

    actuator: str
    epoch: float
    pid: int
    models: tuple[ModelStatus, ...]
    events: tuple[str, ...] = ()
