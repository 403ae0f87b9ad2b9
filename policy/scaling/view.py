"""The input and output of a scaling policy.

``decide(view, memory)`` must be a pure function: its state is the ``memory`` of its proposal, made of JSON
values, so that a decision can be replayed bit for bit from the journal.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from policy.config.control import SloConfig
from policy.engine.replica_capacity import Capability, IdleLatency
from policy.signals.types import Signals

# Smaller rates count as zero.
_ZERO_RATE = 1e-6


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of the model's layer: ``serving`` ones, and the seconds until each starting one is ready.

    ``wanted`` is the count requested of the actuator; ``failures`` counts failed starts in a row.
    """

    wanted: int = 0
    serving: int = 0
    starting_s: tuple[float, ...] = ()
    draining: int = 0
    failures: int = 0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One model at ``at`` (Unix seconds), at least ``tick_s`` after the last decision.

    ``count`` is the desired replica count of its mode, without spare ones, which ``supply`` does not count as
    serving either; ``least`` and ``most`` are its bounds. ``lead_s`` is the start-up time of a replica by the
    quickest path. A request waits in a gateway for at most ``queue_s``. ``idle`` are the latencies of the
    mean request on an idle replica, if they are known.
    """

    at: float
    tick_s: float
    model: str
    mode: str
    count: int
    least: int
    most: int
    supply: Supply
    signals: Signals
    capability: Capability
    lead_s: float
    queue_s: float = 86_400.0
    slo: SloConfig = SloConfig()
    idle: IdleLatency | None = None

    @property
    def has_demand(self) -> bool:
        """Whether requests wait, run or arrived in the last seconds."""
        demand = self.signals.demand
        return demand is not None and (
            demand.queued > 0 or demand.concurrency.last_6_s > 0 or demand.arrivals.last_6_s > 0
        )

    @property
    def is_idle(self) -> bool:
        """Whether gateways report, no request waits or runs, and none arrived in the last minute."""
        demand = self.signals.demand
        return demand is not None and demand.arrivals.last_60_s <= _ZERO_RATE and not self.has_demand

    def within(self, count: int) -> int:
        """``count`` within the bounds of the mode, and at least 1 while there is demand."""
        return max(self.least, min(max(count, 1 if self.has_demand else 0), self.most))

    def unbounded(self, count: int) -> int | None:
        """``count`` where :meth:`within` changes it: for the ``unbounded`` count of a proposal."""
        return None if self.within(count) == count else count

    def hold(self, memory: Any, why: str) -> Proposal:
        """Keep the current count: the proposal of a policy without usable signals."""
        return Proposal(count=self.count, reason=why, memory=memory)


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The desired replica count of a policy, with its reason.

    ``terms`` are the counts that its terms ask for. ``forecast`` is the predicted rate (requests per second)
    when a replica started now is ready, ``forecast_high`` its upper bound; ``None`` without a forecast.
    A ``fixed`` count does not depend on the load, so the mode does not either. ``unbounded`` is the count
    before the bounds of the mode, where the policy applied these itself.
    """

    count: int
    reason: str
    terms: dict[str, float] = {}
    forecast: float | None = None
    forecast_high: float | None = None
    memory: Any = None
    fixed: bool = False
    unbounded: int | None = None


class Policy(Protocol):
    """A scaling policy; one instance per model, made from its parameters."""

    def decide(self, view: View, memory: Any) -> Proposal:
        """The desired replica count; ``memory`` is that of the previous proposal, ``None`` at first.

        Staleness, budgets, step limits and holds are applied to the result.
        """
        ...
