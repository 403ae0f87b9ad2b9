"""What a decision is made of, and what it says: from both, as the log has them, it can be made again."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from policy.config.control import GuardConfig, ModeSwitchConfig, ScaleConfig, SloConfig
from policy.engine.capacity import Capability
from policy.engine.model import Timing
from policy.scaling.view import Proposal, Supply
from policy.signals.types import Signals


class Guardrail(StrEnum):
    """The rules that limit the count of a policy, in the order in which they apply."""

    OVERRIDE = "override"
    STALENESS = "staleness"
    MIN_HEALTHY = "min_healthy"
    BUDGET = "budget"
    STEP = "step"
    HOLD = "hold"


class ModeOption(msgspec.Struct, frozen=True, kw_only=True):
    """A mode that the model may be in, with ``least`` to ``most`` replicas of a shape.

    One replica takes ``gpus``, ``cpus``, ``watts`` and ``cost_per_h``. ``timing`` is its engine model, by
    ``version`` (0: as shipped) and with the relative ``error`` that it showed. ``lead_s`` is from start to
    ready by the quickest path, ``gap_s`` how long nobody serves while the model is switched to it.
    """

    mode: str
    shape: str
    least: int
    most: int
    timing: Timing
    gpus: int = 0
    cpus: int = 0
    watts: float = 0.0
    cost_per_h: float = 0.0
    version: int = 0
    error: float = 0.0
    lead_s: float = 60.0
    gap_s: float = 0.0


class Override(msgspec.Struct, frozen=True, kw_only=True):
    """A manual override of the mode, maybe with a count, ``until`` an instant or until cleared."""

    mode: str
    count: int | None = None
    until: float | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What the decision of ``at`` leaves to the next.

    The memories of the live policy, of the ``shadow`` and of the ``others`` by name. ``low_since`` is since
    when each count below that of today would have been enough, told where that changes: an instant holds for
    its count and all above it. ``better_since`` is since when each other mode promised its gain,
    ``switched_at`` when a switch of mode was last under way, ``starved_since`` since when budgets leave fewer
    replicas than are asked for, ``waits_since`` since when a switch waits for what a lower priority holds.
    Instants are Unix seconds.
    """

    at: float | None = None
    policy: Any = None
    shadow: Any = None
    others: dict[str, Any] = {}
    low_since: dict[int, float] = {}
    better_since: dict[str, float] = {}
    switched_at: float | None = None
    starved_since: float | None = None
    waits_since: float | None = None


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """One model when a decision is due: all that it may depend on.

    ``mode`` and ``count`` are aimed for now; ``settled`` once they were reached, and nothing of another
    layer is left, of which ``leaving`` counts by mode the replicas that still hold anything. ``queue_s`` is
    how long a request may wait in a gateway. ``overflow`` says that upstreams may take what the fleet cannot.
    """

    at: float
    tick_s: float
    model: str
    priority: int
    mode: str
    count: int
    settled: bool
    rungs: tuple[ModeOption, ...]
    supply: Supply
    signals: Signals
    slo: SloConfig
    scale: ScaleConfig
    switching: ModeSwitchConfig
    guard: GuardConfig
    queue_s: float
    leaving: dict[str, int] = {}
    overflow: bool = False
    override: Override | None = None
    memory: Memory = Memory()


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that changed a count, and why."""

    rule: Guardrail
    was: int
    now: int
    why: str


class ModeForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What one rung promises: with ``count`` replicas, so much is met, and it costs so much.

    ``ttft_s`` and ``itl_s`` are predicted 95th percentiles (``None``: it cannot keep up), ``met`` the part
    of the requests that would be within the objective. ``cost`` has no unit: only its ratios count.
    """

    mode: str
    count: int
    cost: float
    met: float
    ttft_s: float | None = None
    itl_s: float | None = None
    why: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What shall be, and why: ``count`` replicas in ``mode``.

    The live policy's ``proposal`` was changed by ``clips``,
    in their order. ``outlooks`` compare the modes; ``gain`` is what a switch that is made promises, as a
    part of the cost. ``shadow`` and the ``others`` say what else would have been asked for. ``short`` is the
    rate in requests per second that budgets and bounds leave unserved, for upstreams if there are any.
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
    clips: tuple[Limit, ...] = ()
    outlooks: tuple[ModeForecast, ...] = ()
    gain: float | None = None
    shadow: Proposal | None = None
    others: dict[str, int] = {}
    short: float = 0.0
    dry_run: bool = False

    @property
    def changes(self) -> bool:
        """Whether it asks for anything else than there was."""
        return (self.mode, self.count) != (self.was_mode, self.was_count)
