"""What routing policies make of shared prefixes and adapters, on simulated replicas without a network.

``python -m loadtests.bench.affinity_policy [--seeds N]`` prints a table for each situation. ``cold`` are
(prefix, replica) pairs that were computed, ``load`` the most requests of a replica over the mean, ``hit``
the part of the requests whose prefix (or adapter) was there in truth. TTFT is in milliseconds.

One module though over 300 lines: the rivals are a few lines each, and say what the fleet must offer them.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from policy.affinity import rendezvous
from policy.request import Request
from policy.routing import Candidate, Router, Settings

PREFIX_TOKENS, TAIL_TOKENS = 1024, 16
STEP_S, TOKEN_S, LOAD_S = 0.003, 30e-6, 0.25
BLOCKS = 8


class Case(NamedTuple):
    """A situation: what is asked for, by whom, and of what fleet.

    ``kinds`` prefixes (or adapters, with ``slots``) by Zipf's law if ``zipf``; ``clients`` in a closed loop,
    or ``rate`` requests a second; ``workers`` gateways that share counters and news, or nothing.
    ``room`` is how many prefixes a replica caches. ``leaves`` and ``joins`` say after how many requests the
    last replica goes and comes back, empty.
    """

    name: str
    kinds: int = 32
    requests: int = 1600
    zipf: bool = False
    replicas: int = 4
    clients: int = 32
    rate: float = 0.0
    workers: int = 1
    shared: bool = True
    slots: int = 0
    room: int = 0
    leaves: int = 0
    joins: int = 0


class Outcome(NamedTuple):
    """What came of it: see the module."""

    cold: int
    load: float
    hit: float
    ttft_mean: float
    ttft_p99: float


Choose = Callable[[Request, Sequence[Candidate], float, float], Candidate]


class Ours:
    """The router that the gateway runs."""

    def __init__(self, case: Case) -> None:
        self.router = Router(Settings(slots=case.slots or 8))

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        """The replica of the decision."""
        self.decision = self.router.choose(request, candidates, at, draw)
        assert self.decision.chosen is not None
        return self.decision.chosen.candidate


class RoundRobin:
    """One after the other."""

    def __init__(self, case: Case) -> None:
        self._turn = 0

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        """The next one."""
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class LeastLoaded:
    """The fewest requests in flight, any of those."""

    def __init__(self, case: Case) -> None:
        pass

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        """One of the least loaded."""
        least = min(candidate.in_flight for candidate in candidates)
        best = [candidate for candidate in candidates if candidate.in_flight == least]
        return best[int(draw * len(best))]


class ConsistentHash:
    """The home by hash, whatever its load."""

    def __init__(self, case: Case) -> None:
        pass

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        """The rendezvous winner."""
        item = request.prefix[BLOCKS - 1] if request.prefix else request.adapter_key
        return max(candidates, key=lambda candidate: rendezvous(item, candidate.key))


class CacheAware:
    """sglang's: where it was sent before; the least loaded if it is new, or if loads differ by much."""

    def __init__(self, case: Case) -> None:
        self._seen: dict[int, set[int]] = {}

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        """By threshold: more than 32 apart and by half is out of balance."""
        item = request.prefix[BLOCKS - 1] if request.prefix else request.adapter_key
        loads = [candidate.in_flight for candidate in candidates]
        homes = self._seen.setdefault(item, set())
        known = [candidate for candidate in candidates if candidate.key in homes]
        if known and not (max(loads) - min(loads) > 32 and max(loads) > 1.5 * min(loads)):
            return known[0]
        best = min(candidates, key=lambda candidate: candidate.in_flight)
        homes.add(best.key)
        return best


POLICIES: dict[str, type[Ours | RoundRobin | LeastLoaded | ConsistentHash | CacheAware]] = {
    "tidegate": Ours,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "consistent hash": ConsistentHash,
    "cache aware": CacheAware,
}


class Replica:
    """One simulated engine: prompts run one after the other, caches forget the longest unused."""

    def __init__(self, key: int, case: Case) -> None:
        self.key = key
        self.free_at = 0.0
        self.begun = 0
        self._prefixes: OrderedDict[int, None] = OrderedDict()
        self._adapters: OrderedDict[int, None] = OrderedDict()
        self._room, self._slots = case.room or 1 << 30, case.slots

    def take(self, kind: int, at: float) -> tuple[float, bool]:
        """When the first token comes, and whether what it needs was there."""
        self.begun += 1
        held, room = (self._adapters, self._slots) if self._slots else (self._prefixes, self._room)
        warm = kind in held
        held[kind] = None
        held.move_to_end(kind)
        if len(held) > room:
            held.popitem(last=False)
        tokens = TAIL_TOKENS + (0 if self._slots or warm else PREFIX_TOKENS)
        start = max(self.free_at, at)
        self.free_at = start + STEP_S + tokens * TOKEN_S
        return self.free_at + (LOAD_S if self._slots and not warm else 0.0), warm


def run(case: Case, policy: str, seed: int) -> Outcome:
    """One run; the same arguments give the same outcome."""
    return _Run(case, policy, random.Random(seed)).outcome()  # noqa: S311 - a simulation


class _Run:
    def __init__(self, case: Case, policy: str, rng: random.Random) -> None:
        self._case, self._rng = case, rng
        weights = [1.0 / (i + 1) if case.zipf else 1.0 for i in range(case.kinds)]
        self._kinds = rng.choices(range(case.kinds), weights, k=case.requests)
        self._hashes = [tuple(rng.getrandbits(63) << 1 for _ in range(BLOCKS)) for _ in range(case.kinds)]
        self._replicas = [Replica(rng.getrandbits(64), case) for _ in range(case.replicas)]
        self._policies = [POLICIES[policy](case) for _ in range(case.workers)]
        self._views = [
            [Candidate(str(i), replica.key) for i, replica in enumerate(self._replicas)]
            for _ in range(case.workers)
        ]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._sent = self._flying = self._hits = 0
        self._pairs: set[tuple[int, int, int]] = set()
        self._lives = [0] * case.replicas
        self._fair = [0.0] * case.replicas
        self._ttfts: list[float] = []

    def outcome(self) -> Outcome:
        case, now = self._case, 0.0
        if case.rate:
            at = 0.0
            for _ in range(case.requests):
                self._at(at, self._send)
                at += self._rng.expovariate(case.rate)
        else:
            for _ in range(min(case.clients, case.requests)):
                self._at(now, self._send)
        while self._events:
            now, _, what = heapq.heappop(self._events)
            what(now)
        loads = [replica.begun / fair for replica, fair in zip(self._replicas, self._fair, strict=True)]
        ordered = sorted(self._ttfts)
        return Outcome(
            cold=len(self._pairs) if not case.slots and not case.room else case.requests - self._hits,
            load=max(loads),
            hit=self._hits / case.requests,
            ttft_mean=1e3 * statistics.fmean(ordered),
            ttft_p99=1e3 * ordered[int(0.99 * len(ordered))],
        )

    def _at(self, at: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), what))

    def _up(self) -> list[int]:
        case = self._case
        gone = case.leaves and case.leaves <= self._sent < case.joins
        return list(range(case.replicas - 1 if gone else case.replicas))

    def _send(self, now: float) -> None:
        case = self._case
        if self._sent >= case.requests:
            return
        if case.joins and self._sent == case.joins:
            self._restart(case.replicas - 1)
        up = self._up()
        kind = self._kinds[self._sent]
        self._sent += 1
        for i in up:  # what is due to each while it is there
            self._fair[i] += 1.0 / len(up)
        worker = self._rng.randrange(case.workers)
        request = self._request(kind)
        views = self._views[worker]
        chosen = self._policies[worker].choose(request, [views[i] for i in up], now, self._rng.random())
        i = next(i for i in up if views[i] is chosen)
        first, warm = self._replicas[i].take(kind, now)
        self._hits += warm
        self._pairs.add((kind, i, self._lives[i]))
        self._ttfts.append(first - now)
        uncached = TAIL_TOKENS if warm else TAIL_TOKENS + PREFIX_TOKENS
        self._begin(request, worker, i, uncached, now)
        policy = self._policies[worker]
        quote = policy.decision.chosen if isinstance(policy, Ours) else None

        def came(at: float) -> None:
            for views in self._views:
                views[i].pending_tokens -= uncached
            if isinstance(policy, Ours) and quote is not None:
                policy.router.timed(request, quote, at - now, at)

        def ended(at: float) -> None:
            for views in self._views:
                views[i].in_flight -= 1
            if not case.rate:
                self._send(at)

        self._at(first, came)
        self._at(first + self._rng.uniform(0.1, 0.3), ended)

    def _begin(self, request: Request, worker: int, i: int, uncached: int, now: float) -> None:
        """The counts that all see at once, and what only those who share are told."""
        case = self._case
        news: tuple[int, ...] = ()
        policy = self._policies[worker]
        if isinstance(policy, Ours):
            news = policy.router.began(request, self._views[worker][i], now)
        for other, views in enumerate(self._views):
            views[i].in_flight += 1
            views[i].pending_tokens += uncached
            if case.shared or other == worker:
                views[i].begun += 1
            listener = self._policies[other]
            if case.shared and other != worker and isinstance(listener, Ours):
                listener.router.learned(news, self._replicas[i].key, now)

    def _request(self, kind: int) -> Request:
        if self._case.slots:
            key = self._hashes[kind][0] | 1
            return Request(
                "m", adapter=str(kind), adapter_key=key, prompt_tokens=TAIL_TOKENS, output_tokens=50
            )
        tail = self._rng.getrandbits(63) << 1
        tokens = PREFIX_TOKENS + TAIL_TOKENS
        step = PREFIX_TOKENS // BLOCKS
        depths = (*range(step, PREFIX_TOKENS + 1, step), tokens)
        prefix = (*self._hashes[kind], tail)
        return Request("m", prompt_tokens=tokens, output_tokens=50, prefix=prefix, depths=depths)

    def _restart(self, i: int) -> None:
        begun = self._replicas[i].begun
        self._replicas[i] = Replica(self._replicas[i].key, self._case)
        self._replicas[i].begun = begun
        self._lives[i] += 1
        for policy in self._policies:
            if isinstance(policy, Ours):
                policy.router.forget(self._replicas[i].key)


OPEN = 130.0
HEAD = " " * 16 + "cold mean/most  load mean/most  hit     TTFT mean/p99"
CASES = (
    Case("32 prefixes, uniform, 32 clients"),
    Case("32 prefixes, uniform, open loop", rate=OPEN),
    Case("32 prefixes, Zipf, 32 clients", zipf=True),
    Case("32 prefixes, Zipf, open loop", zipf=True, rate=OPEN),
    Case("32 prefixes, Zipf, 2 workers", zipf=True, workers=2),
    Case("32 prefixes, Zipf, 8 workers", zipf=True, workers=8),
    Case("32 prefixes, uniform, 8 workers", workers=8),
    Case("32 prefixes, Zipf, 8 hosts", zipf=True, workers=8, shared=False),
    Case("64 prefixes, Zipf, 8 fit a replica", kinds=64, zipf=True, room=8, requests=4000),
    Case("32 prefixes, Zipf, a replica leaves and joins", zipf=True, leaves=500, joins=900, requests=2400),
    Case("200 adapters, Zipf, 8 slots", kinds=200, zipf=True, slots=8, requests=4000),
    Case("200 adapters, Zipf, 8 slots, open loop", kinds=200, zipf=True, slots=8, requests=4000, rate=OPEN),
    Case("200 adapters, Zipf, 8 slots, 8 workers", kinds=200, zipf=True, slots=8, requests=4000, workers=8),
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.bench.affinity_policy", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--only", default="", help="a part of the names of the cases to run")
    given = parser.parse_args()
    for case in CASES:
        if given.only in case.name:
            sys.stdout.write(f"\n{case.name} ({given.seeds} seeds)\n{HEAD}\n")
            for policy in POLICIES:
                row = [run(case, policy, seed) for seed in range(given.seeds)]
                sys.stdout.write(f"{policy:16}{_line(row)}\n")
                sys.stdout.flush()


def _line(row: list[Outcome]) -> str:
    cold = statistics.fmean(outcome.cold for outcome in row)
    load = statistics.fmean(outcome.load for outcome in row)
    hit = statistics.fmean(outcome.hit for outcome in row)
    mean = statistics.fmean(outcome.ttft_mean for outcome in row)
    p99 = statistics.fmean(outcome.ttft_p99 for outcome in row)
    worst = max(outcome.load for outcome in row)
    most = max(outcome.cold for outcome in row)
    return f"{cold:7.1f}/{most:<7} {load:5.3f}/{worst:5.3f}     {hit:6.4f}  {mean:6.1f}/{p99:6.1f}"


if __name__ == "__main__":
    main()
