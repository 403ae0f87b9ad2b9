"""The policies of the adapter benchmark: Tidegate's placement, least loaded, and Ray Serve's multiplexing.

Tidegate's router and placement plan are the deployed ones. Information between processes has the deployed
delays: load reports after a moment, counts with heartbeats, orders as answers to those.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from policy.adapter_placement.plan import PLAN_PERIOD_S
from policy.adapter_placement.types import PlacementHost
from policy.engine.performance_model import Timing
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate
from policy.routing.router import Router
from policy.routing.settings import RoutingSettings
from policy.wire.heartbeat import HEARTBEAT_PERIOD_S
from policy.wire.load_stream import COALESCE_S
from sim.arrivals import Arrival
from sim.simulator.adapters import (
    LeastRecentlyUsedSlots,
    SequentialLoadSlots,
    SimulatedPlacement,
    SimulatedSlots,
)
from sim.simulator.engine import VirtualTimeEngine


class ReplicaSetup(NamedTuple):
    """What all replicas share: the engine, the number of adapter slots, and the seconds of a load."""

    timing: Timing
    slots: int
    load_s: float

    def engine(self, slot_rules: type[SimulatedSlots]) -> VirtualTimeEngine:
        return VirtualTimeEngine(
            self.timing, slots=self.slots, adapter_load_s=self.load_s, slot_rules=slot_rules
        )


class PlacementPolicy:
    """A routing and placement policy; hooks that it does not need are not overridden.

    ``in_flight`` counts the open requests of each replica; the event loop maintains it. ``slot_rules`` are
    the rules of the replicas' adapter slots.
    """

    slot_rules: type[SimulatedSlots] = SimulatedSlots

    def __init__(self, replicas: int, rng: random.Random) -> None:
        self.in_flight = [0] * replicas
        self._rng = rng

    def choose(self, number: int, arrival: Arrival, at: float) -> int:
        raise NotImplementedError

    def first(self, number: int, at: float) -> None:
        """The first token of a request arrived."""

    def changed(self, replica: int, at: float) -> None:
        """The adapters loaded on a replica changed."""

    def tick(self, replicas: Sequence[VirtualTimeEngine], at: float) -> float:
        """Do what is due by the clock; returns when the next action is due, in seconds."""
        return float("inf")

    def moves_per_min(self) -> float:
        """The most placement moves within a minute."""
        return 0.0


class PlannedPlacement(PlacementPolicy):
    """One gateway worker, one controller."""

    def __init__(self, replicas: int, rng: random.Random, equipment: ReplicaSetup) -> None:
        super().__init__(replicas, rng)
        self._equipment = equipment
        timing = equipment.timing
        self._views = [Candidate(f"r{i}", rng.getrandbits(64), timing=timing) for i in range(replicas)]
        self._router = Router(RoutingSettings(slots=equipment.slots))
        self._keys: dict[str, int] = {}
        self._sent: dict[int, tuple[Request, CostEstimate, float]] = {}
        self._lines: dict[int, float] = {}
        self._beat_at = [rng.uniform(0.0, HEARTBEAT_PERIOD_S) for _ in range(replicas)]
        self._plan_at = PLAN_PERIOD_S
        self._placing = SimulatedPlacement(equipment.load_s, self._key)
        self._homed: dict[str, list[float]] = {}

    def choose(self, number: int, arrival: Arrival, at: float) -> int:
        request = Request(
            "m",
            adapter=arrival.adapter,
            adapter_key=self._key(arrival.adapter),
            prompt_tokens=arrival.input_tokens,
            output_tokens=arrival.output_tokens,
        )
        for view, count in zip(self._views, self.in_flight, strict=True):
            view.in_flight = count
        quote = self._router.choose(request, self._views, at, self._rng.random()).chosen
        assert quote is not None
        self._router.began(request, quote.candidate, at)
        quote.candidate.begun += 1
        quote.candidate.pending_tokens += request.prompt_tokens
        self._sent[number] = (request, quote, at)
        return self._views.index(quote.candidate)

    def first(self, number: int, at: float) -> None:
        request, quote, sent = self._sent.pop(number)
        quote.candidate.pending_tokens -= request.prompt_tokens
        quote.candidate.turned_at = at
        self._router.timed(request, quote, at - sent, at)

    def changed(self, replica: int, at: float) -> None:
        self._lines.setdefault(replica, at + COALESCE_S)

    def tick(self, replicas: Sequence[VirtualTimeEngine], at: float) -> float:
        for i in [i for i, due in self._lines.items() if due <= at]:
            del self._lines[i]
            self._router.holds([self._key(each) for each in replicas[i].slots.loaded], (), self._views[i].key)
        if self._plan_at <= at:
            self._replan(replicas, at)
            self._plan_at += PLAN_PERIOD_S
        for i, due in enumerate(self._beat_at):
            if due <= at:
                self._placing.beat(self._views[i].id, replicas[i].slots, self.in_flight[i], at)
                self._beat_at[i] += HEARTBEAT_PERIOD_S
        return min(at + COALESCE_S / 4, self._plan_at, *self._beat_at, *self._lines.values())

    def moves_per_min(self) -> float:
        moved = self._homed.values()
        within = (sum(0.0 <= at - since < 60.0 for at in times) for times in moved for since in times)
        return float(max(within, default=0))

    def _replan(self, replicas: Sequence[VirtualTimeEngine], at: float) -> None:
        equipment, placing = self._equipment, self._placing
        lived = {home.name for home in placing.plan.homes}
        hosts = [
            PlacementHost(
                id=view.id,
                key=view.key,
                slots=equipment.slots,
                seats=equipment.timing.limits.max_num_seqs,
                resident=frozenset(replica.slots.loaded),
            )
            for view, replica in zip(self._views, replicas, strict=True)
        ]
        placing.replan(hosts, at)
        for move in placing.plan.moves:
            if move.target and move.name in lived:
                self._homed.setdefault(move.name, []).append(at)

    def _key(self, adapter: str) -> int:
        key = self._keys.get(adapter)
        if key is None:
            key = self._keys[adapter] = self._rng.getrandbits(64) | 1
        return key


# PUSH_MULTIPLEXED_MODEL_IDS_INTERVAL_S and CONTROL_LOOP_INTERVAL_S of ray/serve/_private/constants.py:
# how often a replica reports its models, and the controller updates the routers.
PUSH_S = 0.1
CONTROL_S = 0.1


class LeastLoadedPlacement(PlacementPolicy):
    """The replica with the fewest requests in flight, ties at random; waiting for an adapter is shared."""

    slot_rules = LeastRecentlyUsedSlots

    def choose(self, number: int, arrival: Arrival, at: float) -> int:
        least = min(self.in_flight)
        return self._rng.choice([i for i, count in enumerate(self.in_flight) if count == least])


class ServeMultiplex(PlacementPolicy):
    """Ray Serve 2.60: ``MultiplexMixin.apply_multiplex_routing`` and ``PowerOfTwoChoicesRequestRouter``.

    Candidates are the replicas that have the model or are about to load it; without any, those with the
    fewest models. Of two random candidates the one with fewer requests is chosen, without a limit on requests
    in flight, as in Ray's LLM deployments. ``_ModelMultiplexWrapper`` evicts the least recently used model
    and loads under a fair lock. In its favour, models in use are never evicted here.
    """

    slot_rules = SequentialLoadSlots

    def __init__(self, replicas: int, rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self._pushed: list[frozenset[str]] = [frozenset()] * replicas
        self._known = list(self._pushed)
        self._push_at = [rng.uniform(0.0, PUSH_S) for _ in range(replicas)]
        self._control_at = rng.uniform(0.0, CONTROL_S)

    def choose(self, number: int, arrival: Arrival, at: float) -> int:
        candidates = [i for i, models in enumerate(self._known) if arrival.adapter in models]
        if not candidates:
            fewest = min(len(models) for models in self._known)
            candidates = [i for i, models in enumerate(self._known) if len(models) == fewest]
        two = self._rng.sample(candidates, min(2, len(candidates)))
        return min(two, key=lambda i: self.in_flight[i])

    def tick(self, replicas: Sequence[VirtualTimeEngine], at: float) -> float:
        for i, replica in enumerate(replicas):
            if self._push_at[i] <= at:
                loading = {replica.slots.loading} if replica.slots.loading is not None else set()
                self._pushed[i] = frozenset(replica.slots.loaded) | set(replica.slots.awaited) | loading
                self._push_at[i] += PUSH_S
        if self._control_at <= at:
            self._known = list(self._pushed)
            self._control_at += CONTROL_S
        return min(self._control_at, *self._push_at)
