"""Tidegate's own policies: the gateway's router, the controller's plan, the rule of a replica's guard.

Router and plan are those that are deployed. What one of the three knows of the others comes as late as it
does between their processes: load lines after a moment, counts with heartbeats, orders as answers to those.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from policy.placement import Host
from policy.request import Request
from policy.routing import Candidate, Quote, Router, Settings
from sim.engine import Engine
from sim.guard_rule import GuardRule
from sim.placing import BEAT_S, LINE_S, PLAN_S, Placing
from sim.policy import Equipment, Policy
from sim.trace import Arrival


class Placed(Policy):
    """One gateway worker, one controller."""

    def __init__(self, replicas: int, rng: random.Random, equipment: Equipment) -> None:
        super().__init__(replicas, rng)
        self._equipment = equipment
        self._rules = [GuardRule() for _ in range(replicas)]
        timing = equipment.timing
        self._views = [Candidate(f"r{i}", rng.getrandbits(64), timing=timing) for i in range(replicas)]
        self._router = Router(Settings(slots=equipment.slots))
        self._keys: dict[str, int] = {}
        self._sent: dict[int, tuple[Request, Quote, float]] = {}
        self._lines: dict[int, float] = {}
        self._beat_at = [rng.uniform(0.0, BEAT_S) for _ in range(replicas)]
        self._plan_at = PLAN_S
        self._placing = Placing(equipment.load_s, self._key)
        self._homed: dict[str, list[float]] = {}

    def rule(self, replica: int) -> GuardRule:
        return self._rules[replica]

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
        self._lines.setdefault(replica, at + LINE_S)

    def tick(self, replicas: Sequence[Engine], at: float) -> float:
        for i in [i for i, due in self._lines.items() if due <= at]:
            del self._lines[i]
            self._router.holds([self._key(each) for each in replicas[i].adapters], (), self._views[i].key)
        if self._plan_at <= at:
            self._replan(replicas, at)
            self._plan_at += PLAN_S
        for i, due in enumerate(self._beat_at):
            if due <= at:
                self._placing.beat(self._views[i].id, self._rules[i], self.in_flight[i], at)
                self._beat_at[i] += BEAT_S
        return min(at + LINE_S / 4, self._plan_at, *self._beat_at, *self._lines.values())

    def moves_per_min(self) -> float:
        return float(
            max(
                (
                    sum(0.0 <= at - since < 60.0 for at in times)
                    for times in self._homed.values()
                    for since in times
                ),
                default=0,
            )
        )

    def _replan(self, replicas: Sequence[Engine], at: float) -> None:
        equipment, placing = self._equipment, self._placing
        lived = {home.name for home in placing.plan.homes}
        hosts = [
            Host(
                id=view.id,
                key=view.key,
                slots=equipment.slots,
                seats=equipment.timing.limits.max_num_seqs,
                resident=frozenset(replica.adapters),
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
