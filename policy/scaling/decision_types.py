"""The input and output of a decision, as the journal keeps them for replay."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from policy.config.control import GuardConfig, ModeSwitchConfig, ScaleConfig, SloConfig
from policy.config.deployment import Gpus
from policy.engine.performance_model import Timing
from policy.engine.replica_capacity import Capability
from policy.scaling.budget_resources import Resources
from policy.scaling.view import Proposal, Supply
from policy.signals.types import Signals
from policy.types import Priority

# A queue that is served sooner than this is what any load leaves.
STANDING_S = 5.0


class Guardrail(StrEnum):
    """The rules that limit the count of a policy, in the order in which they apply."""

    OVERRIDE = "override"
    SPARE = "spare"
    STALENESS = "staleness"
    MIN_HEALTHY = "min_healthy"
    SCHEDULE = "schedule"
    BUDGET = "budget"
    STEP = "step"
    RATE = "rate"
    HOLD = "hold"


class ModeOption(msgspec.Struct, frozen=True, kw_only=True):
    """A possible mode of the model, with ``least`` to ``most`` replicas of a shape.

    ``gpus``, ``cpus``, ``watts`` and ``cost_per_h`` are per replica. ``timing`` has the engine model, of
    ``version`` (0: as shipped) and with a relative ``error``. ``lead_s`` is the start-up time by the quickest
    path, ``gap_s`` the time without a serving replica during a switch to it.
    """

    mode: str
    shape: str
    least: int
    most: int
    gpus: Gpus = 0
    cpus: int = 0
    watts: float = 0.0
    cost_per_h: float = 0.0
    lead_s: float = 60.0
    gap_s: float = 0.0
    version: int = 0
    error: float = 0.0
    timing: Timing

    @property
    def resources(self) -> Resources:
        """What one replica needs of the budget."""
        return Resources(self.gpus, self.cpus, self.watts, self.cost_per_h)


class ModeOverride(msgspec.Struct, frozen=True, kw_only=True):
    """A manual override of the mode, maybe with a count, ``until`` an instant or until cleared."""

    mode: str
    count: int | None = None
    until: float | None = None

    def ended(self, at: float) -> bool:
        """Whether its duration is over."""
        return self.until is not None and self.until <= at


class DecisionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The state that the decision of ``at`` leaves to the next. Instants are Unix seconds.

    It has the memories of the live policy, of the ``shadow`` and of the ``others`` by name. ``low_since``:
    since when each lower count would have been enough (an instant holds for its count and those above).
    ``high_since``: since when each higher count is needed (an instant holds for its count and those below).
    ``changed``: the last changes of the count with their instants, where rates limit them. ``better_since``:
    since when each other mode has a sufficient predicted saving. ``switched_at``: the last mode switch.
    ``starved_since``: since when budgets leave too few replicas. ``waits_since``: since when a switch waits
    for resources of lower priorities. ``queue_clears_by``: until when a switch waits for a queue that was
    predicted to be served by then.
    """

    at: float | None = None
    policy: Any = None
    shadow: Any = None
    others: dict[str, Any] = {}
    low_since: dict[int, float] = {}
    high_since: dict[int, float] = {}
    changed: tuple[tuple[float, int], ...] = ()
    better_since: dict[str, float] = {}
    switched_at: float | None = None
    starved_since: float | None = None
    waits_since: float | None = None
    queue_clears_by: float | None = None


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that the decision on one model may depend on.

    ``mode`` and ``count`` are the desired ones, ``settled`` once reached with no other layer left;
    ``leaving`` counts the remaining replicas of other layers by mode. A request waits in a gateway for at
    most ``queue_s``. With ``spillover``, fallback providers may take what the fleet cannot. ``wall_clocks``
    has the time of each time zone of the schedules, in seconds since 1970-01-01 00:00 there.
    ``slo`` has the strictest targets of those in ``slo_by_priority``, which has all priorities or none.
    """

    at: float
    tick_s: float
    model: str
    priority: int
    mode: str
    count: int
    settled: bool
    mode_options: tuple[ModeOption, ...]
    supply: Supply
    signals: Signals
    slo: SloConfig
    scale: ScaleConfig
    switching: ModeSwitchConfig
    guard: GuardConfig
    queue_s: float
    leaving: dict[str, int] = {}
    spillover: bool = False
    override: ModeOverride | None = None
    memory: DecisionMemory = DecisionMemory()
    wall_clocks: dict[str, float] = {}
    slo_by_priority: dict[Priority, SloConfig] = {}


class AppliedGuardrail(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a guardrail on a count, and its reason."""

    rule: Guardrail
    was: int
    now: int
    why: str


class SwitchCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a switch takes from requests, in seconds.

    It ``lasts_s`` until the last old replica has left: new ones start for ``start_s`` in all, each drain
    takes ``drain_s``, and nothing serves for ``gap_s``. Serving engines have at least the fraction ``speed``
    of their cores; the prompts that were cached take ``refill_s`` again. ``taken_s`` is the length of a
    complete outage that would cause the same total wait. ``queued`` requests wait at first; they are served
    in ``clears_s`` without the switch, in ``clears_after_s`` with it (``None``: never).
    """

    start_s: float
    lasts_s: float
    gap_s: float
    drain_s: float
    speed: float
    refill_s: float
    taken_s: float
    queued: float
    clears_s: float | None
    clears_after_s: float | None

    def delays_queue(self, tick_s: float) -> bool:
        """Whether the queue is served sooner without the switch; one that ends at once is none."""
        if self.clears_s is None or self.clears_s <= max(tick_s, STANDING_S):
            return False
        return self.clears_after_s is None or self.clears_s < self.clears_after_s


class ModeForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The forecast of one mode with ``count`` replicas.

    ``ttft_s`` and ``itl_s`` are predicted 95th percentiles (``None``: it cannot keep up), ``met`` the
    fraction of requests within the SLO. ``cost`` has no unit: only ratios count. ``switch`` is what a switch
    to the mode takes from requests.
    """

    mode: str
    count: int
    cost: float
    met: float
    why: str = ""
    ttft_s: float | None = None
    itl_s: float | None = None
    switch: SwitchCost | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for ``count`` replicas in ``mode``, with its reason.

    ``applied_guardrails`` changed the live policy's ``proposal``, in order. ``mode_forecasts`` compare the
    modes; ``gain`` is the predicted saving of a switch, as a fraction of the cost. ``shadow`` and ``others``
    are the proposals of other policies. ``short`` is the rate (requests per second) left unserved by budgets
    and bounds.
    """

    at: float
    model: str
    mode: str
    count: int
    was_mode: str
    was_count: int
    reason: str
    proposal: Proposal
    capability: Capability
    applied_guardrails: tuple[AppliedGuardrail, ...] = ()
    mode_forecasts: tuple[ModeForecast, ...] = ()
    gain: float | None = None
    shadow: Proposal | None = None
    others: dict[str, int] = {}
    short: float = 0.0
    dry_run: bool = False

    @property
    def changes(self) -> bool:
        """Whether mode or count change."""
        return (self.mode, self.count) != (self.was_mode, self.was_count)
