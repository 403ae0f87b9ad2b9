"""Routing policies on the benchmark's replicas in virtual time: the same engines, without a network.

Pure: one seed, one outcome. A gateway's part is :data:`HOP_S` each way.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from loadtests.bench.offline.policies import Ours, Rival
from loadtests.bench.replica import Counts, Mark, Replica, Setting
from loadtests.bench.upstream_answers import adapter_name
from loadtests.bench.workload import draws, even
from policy.request import Request
from policy.routing.router import Candidate

# From the choice to the replica, and from its first token to the gateway; with an idle processor.
HOP_S = 0.0004
# As the gateway reads the benchmark's chats: a hash for each 512 bytes of what they share.
PREFIX_TOKENS, OWN_TOKENS, BLOCK_TOKENS = 1024, 64, 128
ADAPTER_TOKENS = 32


class Case(NamedTuple):
    """A situation: what is asked for, by whom, and of what fleet.

    ``kinds`` prefixes, or adapters where ``setting`` has any, of which the k-th is asked for with weight
    ``(k+1)**-exponent``; ``rate`` requests a second, or as many as ``clients`` in a closed loop ask for.
    ``workers`` gateways share counters and news, or nothing. ``leaves`` and ``joins`` say after how many
    requests the last replica goes and comes back, empty.
    """

    name: str
    setting: Setting
    kinds: int = 32
    requests: int = 1600
    exponent: float = 0.0
    rate: float = 0.0
    clients: int = 32
    replicas: int = 4
    workers: int = 1
    shared: bool = True
    leaves: int = 0
    joins: int = 0


def arrivals(case: Case, seed: str) -> tuple[list[int], list[float]]:
    """What is asked for, and when it is due in seconds; the same for the same ``seed`` and case."""
    rng = random.Random(f"{seed} {case.name}")  # noqa: S311 - a reproducible workload
    drawn = draws(case.requests, case.kinds, case.exponent, rng)
    return drawn, even(case.requests, case.rate, rng) if case.rate else []


class Played(NamedTuple):
    """What the replicas counted, each request's TTFT in seconds, and the busiest replica's requests over
    what was due to it while it was there."""

    counts: list[Counts]
    ttft: list[float]
    load: float


def play(
    case: Case, policy: type[Rival], drawn: Sequence[int], due: Sequence[float], rng: random.Random
) -> Played:
    """Ask for ``drawn[i]`` at ``due[i]`` seconds, or when a client is free if nothing is due."""
    return _Play(case, policy, drawn, due, rng).whole()


class _Play:
    def __init__(
        self, case: Case, policy: type[Rival], drawn: Sequence[int], due: Sequence[float], rng: random.Random
    ) -> None:
        self._case, self._rng, self._drawn, self._due = case, rng, drawn, due
        self._hashes = [
            tuple(rng.getrandbits(63) << 1 for _ in range(PREFIX_TOKENS // BLOCK_TOKENS))
            for _ in range(case.kinds)
        ]
        self._keys = [rng.getrandbits(64) for _ in range(case.replicas)]
        self._replicas = [Replica(case.setting) for _ in self._keys]
        self._gone: list[Counts] = []
        self._policies = [policy(case.setting.slots) for _ in range(case.workers)]
        self._views = [
            [Candidate(str(i), key) for i, key in enumerate(self._keys)] for _ in range(case.workers)
        ]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._sent = 0
        self._begun: Counter[int] = Counter()
        self._fair: defaultdict[int, float] = defaultdict(float)
        self._ttft: list[float] = []

    def whole(self) -> Played:
        case = self._case
        for at in self._due or [0.0] * min(case.clients, len(self._drawn)):
            self._at(at, self._send)
        while self._events:
            now, _, what = heapq.heappop(self._events)
            what(now)
        counts = [replica.counts() for replica in self._replicas] + self._gone
        load = max(self._begun[i] / fair for i, fair in self._fair.items())
        return Played(counts, self._ttft, load)

    def _at(self, at: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), what))

    def _send(self, now: float) -> None:
        case, index = self._case, self._sent
        if index >= len(self._drawn):
            return
        self._sent += 1
        if case.joins and index == case.joins:
            self._restart(case.replicas - 1)
        gone = case.leaves and case.leaves <= index < case.joins
        up = range(case.replicas - 1 if gone else case.replicas)
        for i in up:  # what is due to each while it is there
            self._fair[i] += 1.0 / len(up)
        worker = self._rng.randrange(case.workers)
        policy, views = self._policies[worker], self._views[worker]
        request = self._request(self._drawn[index])
        chosen = policy.choose(request, [views[i] for i in up], now, self._rng.random())
        i = next(i for i in up if views[i] is chosen)
        tokens = policy.pending(request)
        quote = policy.quote if isinstance(policy, Ours) else None
        self._begin(request, worker, i, tokens, now)

        def arrive(at: float) -> None:
            mark, adapter = self._mark(index)
            first = self._replicas[i].arrive(mark, adapter, at)
            self._ttft.append(first + HOP_S - now)
            self._at(first + HOP_S, came)

        def came(at: float) -> None:
            for views in self._views:
                views[i].pending_tokens -= tokens
                views[i].turned_at = at
            if isinstance(policy, Ours) and quote is not None:
                policy.router.timed(request, quote, at - now, at)
            self._at(at + case.setting.chunks * case.setting.gap_s, ended)

        def ended(at: float) -> None:
            for views in self._views:
                views[i].in_flight -= 1
            if not self._due:
                self._send(at)

        self._at(now + HOP_S, arrive)

    def _begin(self, request: Request, worker: int, i: int, tokens: int, now: float) -> None:
        """The counts that all see at once, and what only those who share are told."""
        case = self._case
        self._begun[i] += 1
        news = self._policies[worker].began(request, self._views[worker][i], now)
        for other, views in enumerate(self._views):
            views[i].in_flight += 1
            views[i].pending_tokens += tokens
            if case.shared or other == worker:
                views[i].begun += 1
            if case.shared and other != worker and news:
                self._policies[other].learned(news, self._keys[i], now)

    def _request(self, kind: int) -> Request:
        if self._case.setting.adapters:
            key = self._hashes[kind][0] | 1
            return Request(
                "m", adapter=str(kind), adapter_key=key, prompt_tokens=ADAPTER_TOKENS, output_tokens=50
            )
        depths = tuple(range(BLOCK_TOKENS, PREFIX_TOKENS + 1, BLOCK_TOKENS))
        tokens = PREFIX_TOKENS + OWN_TOKENS
        return Request("m", prompt_tokens=tokens, output_tokens=50, prefix=self._hashes[kind], depths=depths)

    def _mark(self, index: int) -> tuple[Mark, str]:
        if self._case.setting.adapters:
            return Mark(index, 0, ADAPTER_TOKENS), adapter_name(self._drawn[index])
        return Mark(self._drawn[index], PREFIX_TOKENS, PREFIX_TOKENS + OWN_TOKENS), ""

    def _restart(self, i: int) -> None:
        self._gone.append(self._replicas[i].counts())
        self._replicas[i] = Replica(self._case.setting)
        for policy in self._policies:
            policy.forget(self._keys[i])
