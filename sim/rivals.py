"""What others do with adapters, as small baselines: least loaded, and Ray Serve's multiplexing."""

from __future__ import annotations

import random
from collections.abc import Sequence

from sim.engine import Engine
from sim.policy import Policy
from sim.slots import LeastRecentlyUsed
from sim.trace import Arrival

# PUSH_MULTIPLEXED_MODEL_IDS_INTERVAL_S and CONTROL_LOOP_INTERVAL_S of ray/serve/_private/constants.py: a
# replica says which models it has and loads so often, and the controller tells the routers as often.
PUSH_S = 0.1
CONTROL_S = 0.1


class LeastLoaded(Policy):
    """The fewest requests in flight, any of those; what waits for one adapter shares its load."""

    def rule(self, replica: int) -> LeastRecentlyUsed:
        return LeastRecentlyUsed(shares=True)

    def choose(self, number: int, arrival: Arrival, at: float) -> int:
        least = min(self.in_flight)
        return self._rng.choice([i for i, count in enumerate(self.in_flight) if count == least])


class ServeMultiplex(Policy):
    """Ray Serve 2.60: ``MultiplexMixin.apply_multiplex_routing`` and ``PowerOfTwoChoicesRequestRouter``.

    Candidates are the replicas that have the model or are about to load it, or without any those with the
    fewest models; of two of them, by chance, the one with fewer requests. No bound on requests in flight
    sends any elsewhere, as Ray's LLM deployments have it. ``_ModelMultiplexWrapper`` evicts the least
    recently used and loads under a lock, which those that wait get in turn. One thing is in its favour: what
    requests use stays.
    """

    def __init__(self, replicas: int, rng: random.Random) -> None:
        super().__init__(replicas, rng)
        self._pushed: list[frozenset[str]] = [frozenset()] * replicas
        self._known = list(self._pushed)
        self._push_at = [rng.uniform(0.0, PUSH_S) for _ in range(replicas)]
        self._control_at = rng.uniform(0.0, CONTROL_S)

    def rule(self, replica: int) -> LeastRecentlyUsed:
        return LeastRecentlyUsed(shares=False)

    def choose(self, number: int, arrival: Arrival, at: float) -> int:
        candidates = [i for i, models in enumerate(self._known) if arrival.adapter in models]
        if not candidates:
            fewest = min(len(models) for models in self._known)
            candidates = [i for i, models in enumerate(self._known) if len(models) == fewest]
        two = self._rng.sample(candidates, min(2, len(candidates)))
        return min(two, key=lambda i: self.in_flight[i])

    def tick(self, replicas: Sequence[Engine], at: float) -> float:
        for i, replica in enumerate(replicas):
            if self._push_at[i] <= at:
                loading = {replica.loading} if replica.loading is not None else set()
                self._pushed[i] = frozenset(replica.adapters) | set(replica.awaited) | loading
                self._push_at[i] += PUSH_S
        if self._control_at <= at:
            self._known = list(self._pushed)
            self._control_at += CONTROL_S
        return min(self._control_at, *self._push_at)
