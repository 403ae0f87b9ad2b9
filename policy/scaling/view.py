"""What a policy sees and what it answers.

A policy is an object with one method, ``decide(view, memory)``, which must be a function of its arguments
alone: what it wants to know the next time it returns as the ``memory`` of its proposal, which must be made of
what JSON has. So a decision can be made again from the log, bit for bit.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from policy.config.control import SloConfig
from policy.engine.capacity import Capability
from policy.signals.types import Signals


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of the model's layer: ``serving`` ones, and for each that starts when it will, in seconds.

    ``wanted`` are asked for of the actuator; ``draining`` ones leave. ``failures`` counts starts that
    failed in a row.
    """

    wanted: int = 0
    serving: int = 0
    starting_s: tuple[float, ...] = ()
    draining: int = 0
    failures: int = 0


class View(msgspec.Struct, frozen=True, kw_only=True):
    """One model at the instant ``at`` (Unix seconds), ``tick_s`` after the last decision or more.

    ``count`` replicas of its mode are aimed for now, ``least`` to ``most`` may be. ``lead_s`` is how long a
    replica takes from start to ready, by the quickest path at hand. A request waits in a gateway for at most
    ``queue_s``.
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


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas a policy asks for and why.

    ``terms`` are what each of its terms alone asked for, in replicas. ``forecast`` is the rate in requests
    per second that is expected when a start begun now is ready, ``forecast_high`` its upper bound; ``None``
    of a policy that foresees nothing. ``fixed`` is one that does not go by the load: so the mode does not
    either.
    """

    count: int
    reason: str
    terms: dict[str, float] = {}
    forecast: float | None = None
    forecast_high: float | None = None
    memory: Any = None
    fixed: bool = False


class Policy(Protocol):
    """A scaling policy; made once for each model, of its parameters."""

    def decide(self, view: View, memory: Any) -> Proposal:
        """How many replicas there should be; ``memory`` is that of the proposal before, ``None`` at first.

        Safety is not its business: staleness, budgets, steps and holds are applied to what it answers.
        """
        ...
