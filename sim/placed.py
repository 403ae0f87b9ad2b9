"""Tidegate's own policies: the gateway's router, the controller's plan, the rule of a replica's guard.

Router and plan are those that are deployed. What one of the three knows of the others comes as late as it
does between their processes: load lines after a moment, counts with heartbeats, orders as answers to those.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from policy.engine_model import Timing
from policy.placement import EMPTY, Demand, Host, Plan, plan
from policy.request import Request
from policy.routing import Candidate, Quote, Router, Settings
from sim.arrivals import Arrival
from sim.policy import Policy
from sim.replica import Engine, Replica

# COALESCE_S of serve/engine/guard.py, BEAT_S of serve/heartbeat.py, PLAN_S of serve/placing.py.
LINE_S = 0.02
BEAT_S = 0.5
PLAN_S = 5.0
# HALF_LIFE_S of serve/demand.py and serve/engine/slots.py: so long halves a count.
HALF_LIFE_S = 60.0


class Counts:
    """Ageing counts of requests by adapter; each call is given the instant, in seconds."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float]] = {}

    def __iter__(self) -> Iterator[int]:
        return iter(self._counts)

    def add(self, adapter: int, at: float, count: int = 1) -> None:
        """So many more requests for ``adapter``."""
        self._counts[adapter] = (self.of(adapter, at) + count, at)

    def of(self, adapter: int, at: float) -> float:
        """All requests for ``adapter``, each halved every :data:`HALF_LIFE_S`."""
        total, since = self._counts.get(adapter, (0.0, at))
        return total * math.exp((since - at) * math.log(2) / HALF_LIFE_S)

    def rate(self, adapter: int, at: float) -> float:
        """Requests per second."""
        return self.of(adapter, at) * math.log(2) / HALF_LIFE_S


class GuardRule:
    """serve/engine/slots.py: what is held stays longest, then what would cost most to load again.

    A load costs the same for all here. What is held and not loaded is loaded ahead of requests, for what is
    not held and asked for less, or less than once in a minute.
    """

    shares = True

    def __init__(self) -> None:
        self.hold: dict[int, int] = {}
        self.news: Counter[int] = Counter()
        self._counts = Counts()

    def asked(self, adapter: int, at: float) -> None:
        self.news[adapter] += 1
        self._counts.add(adapter, at)

    def victim(self, idle: Sequence[int], at: float) -> int:
        def worth(adapter: int) -> tuple[int, float]:
            rank = self.hold.get(adapter)
            return (0 if rank is None else len(self.hold) - rank), self._counts.of(adapter, at)

        return min(idle, key=worth)

    def ahead(self, resident: Collection[int], idle: Sequence[int], free: bool, at: float) -> int | None:
        adapter = next((held for held in self.hold if held not in resident), None)
        if adapter is None or free:
            return adapter
        least = max(self._counts.of(adapter, at), 0.5)
        gives = any(each not in self.hold and self._counts.of(each, at) < least for each in idle)
        return adapter if gives else None


class Placed(Policy):
    """One gateway worker, one controller."""

    def __init__(self, replicas: int, rng: random.Random, engine: Engine) -> None:
        super().__init__(replicas, rng)
        self._engine = engine
        self._rules = [GuardRule() for _ in range(replicas)]
        timing = Timing(limits=engine.limits, model=engine.model)
        self._views = [Candidate(f"r{i}", rng.getrandbits(64), timing=timing) for i in range(replicas)]
        self._router = Router(Settings(slots=engine.slots))
        self._keys: dict[int, int] = {}
        self._sent: dict[int, tuple[Request, Quote, float]] = {}
        self._lines: dict[int, float] = {}
        self._beat_at = [rng.uniform(0.0, BEAT_S) for _ in range(replicas)]
        self._plan_at = PLAN_S
        self._plan: Plan = EMPTY
        self._counts = Counts()
        # Requests in flight as seen by heartbeats since the last plan: their sum, and how many beats.
        self._seen = self._beats = 0
        self._homed: dict[str, list[float]] = {}

    def rule(self, replica: int) -> GuardRule:
        return self._rules[replica]

    def choose(self, number: int, arrival: Arrival, at: float) -> int:
        request = Request(
            "m",
            adapter=str(arrival.adapter),
            adapter_key=self._key(arrival.adapter),
            prompt_tokens=arrival.prompt_tokens,
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

    def tick(self, replicas: Sequence[Replica], at: float) -> float:
        for i in [i for i, due in self._lines.items() if due <= at]:
            del self._lines[i]
            self._router.holds([self._key(each) for each in replicas[i].resident], (), self._views[i].key)
        if self._plan_at <= at:
            self._replan(replicas, at)
            self._plan_at += PLAN_S
        for i, due in enumerate(self._beat_at):
            if due <= at:
                self._beat(i, at)
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

    def _beat(self, i: int, at: float) -> None:
        """A replica says what it was asked for, and is answered what to hold."""
        rule = self._rules[i]
        for adapter, count in rule.news.items():
            self._counts.add(adapter, at, count)
        rule.news.clear()
        self._seen += self.in_flight[i]
        self._beats += 1
        held = self._plan.hold.get(self._views[i].id, ())
        rule.hold = {int(name): rank for rank, name in enumerate(held)}

    def _replan(self, replicas: Sequence[Replica], at: float) -> None:
        hosts = [
            Host(
                id=view.id,
                key=view.key,
                slots=self._engine.slots,
                seats=self._engine.limits.max_num_seqs,
                resident=frozenset(map(str, replica.resident)),
            )
            for view, replica in zip(self._views, replicas, strict=True)
        ]
        rates = {adapter: self._counts.rate(adapter, at) for adapter in self._counts}
        # Little's law: who is there, over who comes.
        in_flight = self._seen * len(replicas) / self._beats if self._beats else 0.0
        service_s = in_flight / sum(rates.values()) if rates else 0.0
        self._seen = self._beats = 0
        demands = [
            Demand(
                name=str(adapter),
                key=self._key(adapter),
                rate=rate,
                load_s=self._engine.load_s,
                service_s=service_s,
            )
            for adapter, rate in rates.items()
        ]
        lived = {home.name for home in self._plan.homes}
        self._plan = plan(hosts, demands, self._plan, at)
        for move in self._plan.moves:
            if move.target and move.name in lived:
                self._homed.setdefault(move.name, []).append(at)

    def _key(self, adapter: int) -> int:
        key = self._keys.get(adapter)
        if key is None:
            key = self._keys[adapter] = self._rng.getrandbits(64) | 1
        return key
