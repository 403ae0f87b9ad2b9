"""The router: a request goes to the replica with the least predicted TTFT plus cost to others.

The costs are in :mod:`policy.routing.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import nsmallest
from typing import Final

from policy.engine.performance_model import Timing
from policy.engine.prefill_estimate import GENERIC, step_table_of
from policy.hashing import rendezvous
from policy.request import Request
from policy.routing.cache_affinity import PopularityCounter, ShareSums, add_taker, balance_of, mean_load
from policy.routing.cost import Candidate, CandidateCost, CostEstimate, CostModel
from policy.routing.prediction_correction import InterTokenGaps
from policy.routing.replica_state import ReplicaState
from policy.routing.settings import RoutingSettings
from policy.wire.load_stream import CachedPrefix


class PickResult:
    """The ``chosen`` replica and the ``reason``; without one the request waits in the gateway.

    ``rows`` are the estimates of all candidates; ``quotes`` has them with names.
    """

    # Written out, because named tuples are not compiled.
    __slots__ = ("chosen", "reason", "rows")

    def __init__(self, chosen: CostEstimate | None, rows: Sequence[CandidateCost], reason: str) -> None:
        self.chosen = chosen
        self.rows = rows
        self.reason = reason

    @property
    def quotes(self) -> tuple[CostEstimate, ...]:
        """The estimates of all candidates, the chosen one included."""
        return tuple(row.estimate() for row in self.rows)


NO_ROOM: Final = "no candidate has room"
# The expected rest of a request that ran longer than its longest answer takes, in seconds.
OVERDUE_S: Final = 2.0
TOO_LATE: Final = "no candidate would start it in time"
CACHED: Final = "its prefix is cached there"
RESIDENT: Final = "its adapter is loaded there"
AWAY: Final = "away from what is cached, which would take longer or has more than its share"
HOME: Final = "a home for a new prefix"
SOONEST: Final = "least predicted time to first token"
# How many candidates are estimated; more are reduced to a shortlist.
MOST_QUOTES: Final = 8
MAX_SITES: Final = 1024
# A replica that was no candidate for so long is lifted to the mean load of the others.
ABSENT_S: Final = 5.0
# How much slower the replica of a session's last request may be, in seconds.
SESSION_S: Final = 0.01
SPAN: Final = 4096
# The weight of one first token in the mean adapter load time.
LOAD_GAIN: Final = 0.1


class Router:
    """The routing state of one model in one gateway worker."""

    def __init__(self, settings: RoutingSettings | None = None) -> None:
        self.settings = settings or RoutingSettings()
        self._sites: dict[int, ReplicaState] = {}
        self._gaps = InterTokenGaps()
        self._popular = PopularityCounter(SPAN)
        self._costs = CostModel(self._popular)
        self._measured = 0
        self._hash_tokens = 128.0

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> PickResult:
        """The best of ``candidates``; ties are broken by ``draw`` in [0, 1)."""
        present = ShareSums()
        sites = [self._candidate(candidate, at, present) for candidate in candidates]
        pairs = self._with_room(request, candidates, sites, at)
        if not pairs:
            return PickResult(None, (), NO_ROOM)
        balance = balance_of([site.share for site in sites], self._popular.worth)
        if len(pairs) > MOST_QUOTES:
            pairs = self._shortlist(request, pairs, at)
        rows, costs, held = self._costs.rows(request, pairs, balance, at)
        if (limit := self.settings.start_s) < math.inf:
            for i, row in enumerate(rows):
                if row.waits > limit and row.candidate.in_flight:
                    costs[i] = math.inf
        best = _least(costs)
        if costs[best[0]] == math.inf:
            return PickResult(None, rows, TOO_LATE)
        if request.session or len(best) > 1:
            row = rows[self._among(request, pairs, costs, draw)]
        else:
            row = rows[best[0]]
        chosen = row.estimate()
        if request.prefix:
            if chosen.uncached < request.prompt_tokens:
                reason = CACHED
            else:
                reason = AWAY if held and any(row.uncached < chosen.uncached for row in rows) else HOME
        else:
            reason = RESIDENT if request.adapter_key and not chosen.adapter else SOONEST
        return PickResult(chosen, rows, reason)

    def began(self, request: Request, candidate: Candidate, at: float) -> tuple[int, ...]:
        """``request`` was sent there; returns the hashes that are new, for other gateways."""
        site = self._site(candidate, at, ShareSums())
        if not candidate.pending_tokens:  # its next step starts this one
            candidate.turned_at = at + 0.5 * site.step_s if candidate.in_flight else at
        news: tuple[int, ...] = ()
        prefix = request.prefix
        shared = 0
        if prefix:
            depth = site.held.depth(prefix, at)
            tokens = request.prompt_tokens
            if depth:
                shared = request.depths[depth - 1]
                self._popular.add(prefix[depth - 1])
                tokens = max(tokens - site.cached(request, depth), 0)
            else:
                if prefix[0] not in site.held:  # otherwise it was evicted from its home
                    site.share.homes += 1.0
                self._relieve(prefix, site, at)
            news = prefix[depth:]
            if news:
                self._hash_tokens += 0.02 * (tokens / len(news) - self._hash_tokens)
            site.held.touch(prefix, tokens, at)
        else:
            site.held.given += request.prompt_tokens
        if request.adapter_key:
            self._popular.add(request.adapter_key)
            if site.slots.use(request.adapter_key):
                site.loading(at)
                news = (*news, request.adapter_key)
        if request.session:
            former = self._sites.get(self._costs.returns.began(request.session, site.key, at))
            if former is not None and former is not site:
                former.sessions.leave(request.session)
            turns = self._costs.returns.turns(request.session)
            site.sessions.use(request.session, turns, request.prompt_tokens, shared, at)
            site.sessions.settle(site.held.capacity, at, self._costs.returns)
        return news

    def learned(self, hashes: Sequence[int], key: int, at: float) -> None:
        """Another gateway reports that the replica with ``key`` has these prefixes and adapters."""
        site = self._sites.get(key) or self._open(key, None)
        # The report includes what this worker sent there.
        prefix = [value for value in hashes if not value & 1 and value not in site.held]
        if prefix:
            # A single new hash continues a known prefix.
            if len(prefix) > 1:
                site.share.homes += 1.0
                self._relieve(prefix, site, at)
            site.held.touch(prefix, int(self._hash_tokens * len(prefix)), at)
        for value in hashes:
            if value & 1:
                site.slots.use(value)

    def cached(
        self, held: Sequence[CachedPrefix], gone: Sequence[CachedPrefix], key: int, at: float, *, reset: bool
    ) -> None:
        """The replica with ``key`` reports what its engine holds; after ``reset`` that and nothing else."""
        site = self._sites.get(key)
        if reset:
            site = site or self._open(key, None)
            site.held.reset()
        if site is not None and site.held.exact:
            site.held.report(held, gone, at)

    def holds(self, loaded: Sequence[int], refused: Sequence[int], key: int) -> None:
        """The replica with ``key`` reports which adapters it has loaded, and which it could not load."""
        site = self._sites.get(key) or self._open(key, None)
        site.slots.report(loaded, refused)

    def forget(self, key: int) -> None:
        """The replica with ``key`` is gone or was restarted: nothing is cached there."""
        self._sites.pop(key, None)

    def timed(self, request: Request, quote: CostEstimate, ttft_s: float, at: float) -> None:
        """The first token came ``ttft_s`` after the request was sent to ``quote.candidate``."""
        site = self._sites.get(quote.candidate.key)
        if site is None or quote.modelled <= 0.0 or ttft_s <= 0.0:
            return
        if quote.adapter:
            site.loaded()
            site.slots.confirm(request.adapter_key)
        if quote.loads:  # the rest of the time is that of the loads
            error = max(-quote.total, min(quote.total, ttft_s - quote.total)) / quote.loads
            self._measured += 1
            gain = max(LOAD_GAIN, 1.0 / self._measured)
            self._costs.load_s = max(0.0, self._costs.load_s + gain * error)
            site.load_s = max(0.0, site.load_s + gain * error)
            return
        line = self._costs.line
        if quote.uncached < request.prompt_tokens and self._was_gone(request, quote, site, ttft_s):
            return  # the time says nothing about the replica's speed
        site.residual.learn(line.of(quote.modelled), ttft_s, line.usual_s, at)
        line.learn(quote.modelled, ttft_s)

    def paced(self, candidate: Candidate, gap_s: float) -> None:
        """An answer of ``candidate`` ended, with a mean inter-token gap of ``gap_s`` seconds."""
        site = self._sites.get(candidate.key)
        if site is None or gap_s <= 0.0:
            return
        self._gaps.learn(_next_step_s(candidate, site), gap_s)

    def loss_s(self, request: Request, candidate: Candidate, replicas: int, at: float) -> float:
        """See :meth:`policy.routing.replica_state.ReplicaState.loss_s`."""
        site = self._sites.get(candidate.key)
        return 0.0 if site is None else site.loss_s(request, replicas, at)

    def service_s(self, request: Request, candidates: Sequence[Candidate]) -> float:
        """How long ``request`` would run on the fullest of ``candidates``, in seconds.

        It is 0 without any, and where neither the replica nor the deployment says how fast it is.
        """
        if not candidates:
            return 0.0
        fullest = max(candidates, key=lambda candidate: candidate.in_flight)
        if self.settings.assumed is GENERIC and (fullest.timing is None or fullest.timing.model is None):
            return 0.0
        return self.stays_s(request, fullest, request.output_tokens)

    def longest_s(self, request: Request, candidate: Candidate) -> float:
        """How long ``request`` runs there, in seconds, if its answer is a long one."""
        return self.stays_s(request, candidate, request.long_tokens)

    def remaining_s(self, request: Request, candidate: Candidate, ran_s: float) -> float:
        """How long a request that has run for ``ran_s`` seconds there is expected to run on.

        As predicted; one that runs longer than that as long again, within its limit. One beyond its limit is
        slower than predicted, and expected to end soon.
        """
        expected_s = self.stays_s(request, candidate, request.output_tokens) - ran_s
        limit = request.limit_tokens
        left_s = self.stays_s(request, candidate, limit) - ran_s if limit else ran_s
        return max(expected_s, min(ran_s, left_s if left_s > 0.0 else OVERDUE_S))

    def stays_s(self, request: Request, candidate: Candidate, output_tokens: int) -> float:
        """How long ``request`` runs there, in seconds, with an answer of ``output_tokens``."""
        table = step_table_of(candidate.timing, self.settings.assumed)
        return table.stays_s(request, candidate.in_flight, output_tokens, self._gaps.factor)

    def _was_gone(self, request: Request, quote: CostEstimate, site: ReplicaState, ttft_s: float) -> bool:
        """Whether a prefix assumed cached was not: visible where a full prefill takes twice as long."""
        if site.held.exact:
            return False
        whole = site.pace.prefill_s(request.prompt_tokens, 0.0, 0) - site.pace.prefill_s(
            quote.uncached, 0.0, 0
        )
        without = quote.total + self._costs.line.slope * whole
        if without <= 2.0 * quote.total:
            return False
        if ttft_s <= 0.5 * (quote.total + without):
            site.held.survived(quote.age)
            return False
        site.held.was_gone(quote.age)
        site.held.given += request.prompt_tokens - quote.uncached
        return True

    def _site(self, candidate: Candidate, at: float, present: ShareSums) -> ReplicaState:
        site = self._sites.get(candidate.key)
        if site is None:
            site = self._open(candidate.key, candidate.timing, present)
        elif site.timing is not candidate.timing:
            site.time(candidate.timing, self.settings.assumed)
        if at - site.seen_at > ABSENT_S:
            self._level(site, at, present)
        site.seen_at = at
        count, pending, kv_used = candidate.in_flight, candidate.pending_tokens, candidate.kv_used
        if count != site.in_flight or pending != site.pending or kv_used != site.kv_used:
            site.count(count, pending, kv_used)
        return site

    def _candidate(self, candidate: Candidate, at: float, present: ShareSums) -> ReplicaState:
        """The state of a candidate, with its share up to date, also in ``present``."""
        site = self._site(candidate, at, present)
        if candidate.begun != site.share.seen:
            site.share.take(candidate.begun)
        if present.ready:
            present.put(site.share)
        return site

    def _with_room(
        self, request: Request, candidates: Sequence[Candidate], sites: list[ReplicaState], at: float
    ) -> list[tuple[Candidate, ReplicaState]]:
        """The candidates that take one more request within their bound and the ITL SLO.

        The SLO holds a request back for at most the duration of its answer at that pace, and is ignored if no
        candidate meets it even for a single request.
        """
        itl_s = self.settings.itl_s
        paced = itl_s < math.inf and at - request.arrived < request.output_tokens * itl_s
        pairs: list[tuple[Candidate, ReplicaState]] = []
        slow: list[tuple[Candidate, ReplicaState]] = []
        for i, candidate in enumerate(candidates):
            site = sites[i]
            if candidate.bound and candidate.in_flight >= candidate.bound:
                continue
            if paced and candidate.in_flight and not self._keeps_pace(candidate, site):
                if not self._could_keep_pace(site):
                    slow.append((candidate, site))
                continue
            pairs.append((candidate, site))
        if slow and not any(self._could_keep_pace(site) for site in sites):
            pairs += slow
        return pairs

    def _open(self, key: int, timing: Timing | None, present: ShareSums | None = None) -> ReplicaState:
        if len(self._sites) >= MAX_SITES:
            del self._sites[next(iter(self._sites))]
            if present is not None:
                present.ready = False
        site = self._sites[key] = ReplicaState(key, timing, self.settings.assumed, self.settings.slots)
        return site

    def _level(self, site: ReplicaState, at: float, present: ShareSums) -> None:
        """Lift the load of a replica that is new, or back, to the mean of the others."""
        if not present.ready:
            present.start([(each.share, at - each.seen_at < ABSENT_S) for each in self._sites.values()])
        present.level(site.share)

    def _relieve(self, prefix: Sequence[int], taker: ReplicaState, at: float) -> None:
        """A prefix got a second home, which can take over part of its traffic."""
        first = prefix[0]
        mean: float | None = None  # of all replicas, if there is another home
        for site in self._sites.values():
            held = site.held
            if site is taker or not (first in held.young or first in held.old):
                continue
            if depth := held.depth(prefix, at):
                part = self._popular.share(prefix[depth - 1]) * len(self._sites)
                if mean is None:
                    mean = mean_load([other.share for other in self._sites.values()])
                add_taker(site.share, taker.share, part, mean)

    def _keeps_pace(self, candidate: Candidate, site: ReplicaState) -> bool:
        return self._gaps.factor * _next_step_s(candidate, site) <= self.settings.itl_s

    def _could_keep_pace(self, site: ReplicaState) -> bool:
        """Whether steps are within the ITL SLO with one request alone."""
        return self._gaps.factor * site.pace.step_s(1.0, 0.0, 1.0) <= self.settings.itl_s

    def _shortlist(
        self, request: Request, pairs: list[tuple[Candidate, ReplicaState]], at: float
    ) -> list[tuple[Candidate, ReplicaState]]:
        """The least loaded candidates, and those with most of its prefix, ties by rendezvous hashing."""
        best = nsmallest(4, pairs, key=lambda pair: (pair[0].pending_tokens, pair[0].in_flight))
        item = request.prefix[0] if request.prefix else request.adapter_key
        if item:
            depths = [site.held.depth(request.prefix, at) for _, site in pairs]
            ranked = nsmallest(
                4,
                range(len(pairs)),
                key=lambda i: (
                    -depths[i],
                    request.adapter_key not in pairs[i][1].slots,
                    -rendezvous(item, pairs[i][0].key),
                ),
            )
            best += [pairs[i] for i in ranked if pairs[i] not in best]
        return best

    def _among(
        self, request: Request, pairs: list[tuple[Candidate, ReplicaState]], costs: list[float], draw: float
    ) -> int:
        """The place of one of equal candidates, or of the session's last if it is hardly slower."""
        if request.session and (last := self._costs.returns.last(request.session)):
            for i, (candidate, _) in enumerate(pairs):
                if candidate.key == last:
                    costs[i] -= SESSION_S
        best = _least(costs)
        if len(best) == 1:
            return best[0]
        if item := request.prefix[0] if request.prefix else request.adapter_key:
            return max(best, key=lambda i: rendezvous(item, pairs[i][0].key))
        return best[int(draw * len(best))]


def _least(costs: list[float]) -> list[int]:
    """The places of the least of ``costs``, of which there is one at least."""
    least, best = costs[0], [0]
    for i in range(1, len(costs)):
        cost = costs[i]
        if cost < least:
            least, best = cost, [i]
        elif cost == least:
            best.append(i)
    return best


def _next_step_s(candidate: Candidate, site: ReplicaState) -> float:
    """Seconds of a step there with one more request running."""
    running = candidate.in_flight + 1
    return site.pace.step_s(running, candidate.kv_used * site.pace.kv_tokens, running)
