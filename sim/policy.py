"""What a policy of routing and placement decides in the benchmark of adapters, and what it is told."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from policy.engine_model import Timing
from sim.engine import Engine
from sim.slots import Rule
from sim.trace import Arrival


class Equipment(NamedTuple):
    """What all replicas are alike in: the engine, how many adapters it holds, and the seconds of a load."""

    timing: Timing
    slots: int
    load_s: float

    def engine(self, rule: Rule) -> Engine:
        """The engine of one replica."""
        return Engine(self.timing, slots=self.slots, adapter_load_s=self.load_s, rule=rule)


class Policy:
    """Where requests go; what it need not hear of it does not overwrite.

    ``in_flight`` counts what was sent to each replica and has not ended; who plays the policy keeps it.
    """

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self.in_flight = [0] * replicas
        self._rng = rng

    def rule(self, replica: int) -> Rule:
        """What that replica does with its slots."""
        raise NotImplementedError

    def choose(self, number: int, arrival: Arrival, at: float) -> int:
        """The replica for a request."""
        raise NotImplementedError

    def first(self, number: int, at: float) -> None:
        """The first token of a request came."""

    def changed(self, replica: int, at: float) -> None:
        """What that replica has loaded has changed."""

    def tick(self, replicas: Sequence[Engine], at: float) -> float:
        """Do what is due by the clock; returns when that is next, in seconds."""
        return float("inf")

    def moves_per_min(self) -> float:
        """How often at most one adapter was given another home within a minute, by who gives homes."""
        return 0.0
