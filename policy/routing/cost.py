"""The cost of a request at each replica, in seconds: its predicted TTFT there, and what it costs others.

:func:`estimate` predicts the TTFT term by term, :class:`CostModel` adds the cost to others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from policy.engine.performance_model import Timing
from policy.hashing import rendezvous
from policy.request import Request
from policy.routing.cache_affinity import (
    COPY,
    CROWDED,
    CROWDED_BY_COPIES,
    LEAN,
    SLACK,
    PopularityCounter,
    ReplicaShare,
    ShareAverages,
    crowd_price,
)
from policy.routing.prediction_correction import LEAST, OnlineLine
from policy.routing.replica_state import ASSUMED_LOAD_S, ReplicaState
from policy.routing.session_return import SessionReturns

# From this prediction error on a replica gets a smaller share of the traffic.
SLOW: Final = 1.5
# The price, in loads, of a request for an adapter at any but the first replica that has it: another copy
# takes a slot while requests come for it.
COPIES: Final = 2.0
# The eviction candidate is the least popular of this many least recently used adapters.
VICTIMS: Final = 8
# How far beyond the mean a replica's load may be before requests for its adapters go elsewhere.
UNEVEN: Final = 0.15
# The price of a session's tokens that another replica holds, per second of their prefill: at 0 sessions move
# so often that twice as many tokens are computed twice, at 1 they wait too long for a full replica.
SECOND_PREFILL: Final = 0.7
# Preempted requests are preempted again: tokens that do not fit are computed more often than once. At 1,
# agents at full load, with half of the cache that they need, compute 1.7 to 4 times as many twice.
PREEMPTIONS: Final = 3.0
# With each request for an adapter, a replica's load time moves this far towards the mean: one that is
# believed slow gets no loads that could correct it.
ALIKE: Final = 0.1

# Tuples are made directly: a constructor with names costs half a microsecond per choice.
_tuple = tuple.__new__


@dataclass(slots=True, eq=False)
class Candidate:
    """A replica as the router sees it; the owner of the connection updates it.

    ``key`` is a 64-bit hash of ``id``, the same in every process. ``in_flight`` counts the requests there,
    ``bound`` is the most it accepts (0: unknown), ``pending_tokens`` are prompt tokens still to compute,
    ``turned_at`` is when the prefill of the first of them started, ``begun`` the number of requests ever sent
    there by this host, ``kv_used`` a fraction, ``timing`` the reported speed.
    """

    id: str
    key: int
    bound: int = 0
    in_flight: int = 0
    timing: Timing | None = None
    pending_tokens: int = 0
    turned_at: float = 0.0
    begun: int = 0
    kv_used: float = 0.0


class CostEstimate(NamedTuple):
    """Predicted seconds to the first token at one candidate, term by term.

    ``burden`` is what the choice costs others, in seconds (a prefill that they wait for, an evicted adapter,
    a share of the traffic above the bound), and no part of the TTFT. ``uncached`` are the prompt tokens to
    compute, ``modelled`` the seconds by the engine model alone, ``age`` the tokens sent there since the
    cached prefix was last used, ``loads`` the adapter loads before the first token, its own included.
    ``cached`` are the prompt tokens believed to be in its KV cache: with the engine's own report they are
    exact, where those of the whole prompt are an estimate.
    """

    candidate: Candidate
    wait: float = 0.0
    prefill: float = 0.0
    adapter: float = 0.0
    pressure: float = 0.0
    burden: float = 0.0
    uncached: int = 0
    modelled: float = 0.0
    age: int = 0
    loads: int = 0
    cached: int = 0

    @property
    def total(self) -> float:
        return self.wait + self.prefill + self.adapter + self.pressure


def pressure_s(request: Request, candidate: Candidate, site: ReplicaState) -> float:
    """Seconds to recompute the KV tokens that do not fit; only for a replica with a known KV size.

    A running request takes KV for its whole prompt: cached tokens that no other one uses count as free.
    """
    pace = site.pace
    wanted = site.kv_tokens + candidate.pending_tokens + request.prompt_tokens + request.output_tokens
    return PREEMPTIONS * (wanted - pace.kv_tokens) / pace.capacity if wanted > pace.kv_tokens else 0.0


def estimate(  # noqa: PLR0917 - names cost a router a tenth of it
    request: Request,
    candidate: Candidate,
    site: ReplicaState,
    uncached: int,
    slope: float,
    fixed_s: float,
    copied_s: float = 0.0,
) -> tuple[float, float, float, float, float, float]:
    """All terms in the order of :class:`CostEstimate`, corrected by what first tokens have shown.

    ``slope`` and ``fixed_s`` are of a :class:`policy.routing.prediction_correction.OnlineLine`; adapter loads
    are measured directly. The fifth value is the request's own prefill without the fixed part, the sixth the
    TTFT by the engine model alone. The wait is for adapter loads, earlier prompts or half a step, and a free
    sequence. The prefill is that of its uncached tokens, in the steps of earlier prompts. ``copied_s`` is the
    time to copy its cached tokens from host memory; vLLM copies beside its steps, so others do not wait.
    """
    pace, tokens, shared = site.pace, uncached, 0.0
    if not site.ahead_s:
        waits = site.still_s
    elif (since := site.seen_at - candidate.turned_at) < 0.0:  # one step will compute all of them
        waits = site.ahead_s + site.seat_s - since
        tokens, shared = candidate.pending_tokens + uncached, site.ahead_s
    else:  # the first step is running
        most = 0.9 * site.first_s
        waits = site.first_s - (since if since < most else most) + site.rest_s + site.seat_s
        tokens, shared = site.rest + uncached, site.rest_s
    own = pace.prefill_s(tokens, site.kv_tokens, site.running) - shared
    loads = 0.0 if not request.adapter_key or request.adapter_key in site.slots else site.load_s
    presses = pressure_s(request, candidate, site) if pace.kv_tokens else 0.0
    modelled = waits + own + copied_s + presses
    own *= slope
    floor, took = LEAST * own, own + copied_s * slope + fixed_s
    waits *= slope
    if site.loads:
        ahead = site.loads_s(site.seen_at, candidate.turned_at)
        # Requests for loaded adapters run between two loads.
        if ahead > site.load_s and (not request.adapter_key or site.slots.loaded(request.adapter_key)):
            ahead = site.load_s
        waits += ahead
    return waits, took if took > floor else floor, loads, presses * slope, own, modelled


class CandidateCost:
    """What one candidate costs a request, as machine code reads it; :meth:`estimate` has it with names.

    ``own`` is the prefill by itself, ``before`` the adapter loads before the first token; the others are as
    in :class:`CostEstimate`.
    """

    # Written out, because named tuples are not compiled.
    __slots__ = (
        "age", "before", "burden", "cached", "candidate", "loads", "modelled", "own", "presses", "site",
        "took", "uncached", "waits",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - made for each candidate of each request
        self,
        candidate: Candidate,
        site: ReplicaState,
        terms: tuple[float, float, float, float, float, float],
        uncached: int,
        age: int,
        cached: int,
    ) -> None:
        self.candidate = candidate
        self.site = site
        self.waits, self.took, self.loads, self.presses, self.own, self.modelled = terms
        self.uncached = uncached
        self.age = age
        self.cached = cached
        self.burden = 0.0
        self.before = 0

    def estimate(self) -> CostEstimate:
        return _tuple(
            CostEstimate,
            (
                self.candidate, self.waits, self.took, self.loads, self.presses, self.burden, self.uncached,
                self.modelled, self.age, self.before, self.cached,
            ),
        )  # fmt: skip


class CostModel:
    """The costs of one model's requests, with what they are corrected by.

    ``line`` corrects predictions of all replicas, ``popular`` counts the requests for prefixes and adapters,
    ``load_s`` is the mean load time of an adapter in seconds, ``returns`` when sessions return.
    """

    def __init__(self, popular: PopularityCounter) -> None:
        self.line = OnlineLine()
        self.popular = popular
        self.load_s = ASSUMED_LOAD_S
        self.returns = SessionReturns()
        self._cold_s = 0.0

    def rows(  # noqa: PLR0915
        self,
        request: Request,
        pairs: list[tuple[Candidate, ReplicaState]],
        balance: ShareAverages,
        at: float,
    ) -> tuple[list[CandidateCost], list[float], bool]:
        """The estimates of each candidate, their total costs, and whether any holds the prefix."""
        prefix, key, prompt = request.prefix, request.adapter_key, max(request.prompt_tokens, 1)
        first = prefix[0] if prefix else 0
        line = self.line
        # The deepest prefix that any replica holds, and the replica that used the first block most recently.
        deepest, anchor, youngest, resident = 0, key, 0, False
        former: ReplicaState | None = None
        primary: ReplicaState | None = None
        most = cold = most_claim = 0.0
        warm_s = math.inf
        rows: list[CandidateCost] = []
        for candidate, site in pairs:
            uncached, age, cached, copied_s = prompt, 0, 0, 0.0
            if key:
                site.load_s += ALIKE * (self.load_s - site.load_s)
            if prefix:
                held = site.held
                if first in held.young or first in held.old or at - held.turned_at > held.turn_s:
                    if depth := held.depth(prefix, at):
                        last = prefix[depth - 1]
                        cached = site.cached(request, depth)
                        uncached, age = max(prompt - cached, 1), held.age(last)
                        if held.host:
                            copied_s = held.host.get(last, 0) * site.pace.copy_s
                        if depth > deepest:
                            deepest, anchor = depth, last
                    elif first in held and (former is None or held.age(first) < youngest):
                        youngest, former = held.age(first), site
            weight = site.pace.capacity
            if site.residual.alike:
                terms = estimate(request, candidate, site, uncached, line.slope, line.fixed_s, copied_s)
            else:
                factor = site.residual.factor(at)
                terms = estimate(
                    request, candidate, site, uncached, line.slope * factor, line.fixed_s * factor, copied_s
                )
                if factor > SLOW:
                    weight /= factor
            own = terms[4]
            site.share.weight = weight
            # The cost on the fastest replica: the time on a slow one would overrate an even load.
            most = weight if weight > most else most
            cold = own * weight if own * weight > cold else cold
            warm_s = own if own < warm_s else warm_s
            if key and key in site.slots:
                claim = rendezvous(key, candidate.key)
                if not resident or claim > most_claim:
                    primary, most_claim = site, claim
                resident = True
            rows.append(CandidateCost(candidate, site, terms, uncached, age, cached))
        cold_s = cold / most
        if deepest:
            former = None
            if cold_s > warm_s:
                self._cold_s += (0.05 if self._cold_s else 1.0) * (cold_s - warm_s - self._cold_s)
            cold_s = self._cold_s
        new = deepest == 0 and former is None and (bool(prefix) or (key != 0 and not resident))
        mean, least_due, dear, crowd = balance.load, balance.least, balance.unit, balance.homes
        homeless = prefix and not new
        costs: list[float] = []
        for each in rows:
            candidate, site, uncached, own = each.candidate, each.site, each.uncached, each.own
            unit, share = cold_s, site.share
            # Running requests stall during the prefill; a copy of a prefix also takes KV cache.
            burden = own - own / (1.0 + candidate.in_flight)
            if key:
                unit += site.load_s
                if key not in site.slots:
                    burden += self._eviction(key, site)
                if resident and site is not primary:
                    burden += COPIES * site.load_s
            if request.session:
                burden += SECOND_PREFILL * (own - warm_s)
            elif new:
                burden += cold_s * (share.due - least_due) * dear
                if key and (fair := share.weight * mean) > 0.0 and share.load / fair - 1.0 > SLACK:
                    burden += unit * balance.share_price(share, 0.0)
                homes = crowd * share.weight
                if prefix and share.homes > 1.0 + homes and homes * prompt <= site.held.capacity:
                    burden += unit * crowd_price(share, homes, CROWDED)
            elif homeless and not each.age and uncached >= prompt and site is not former:
                burden += unit * (share.due - least_due) * dear + own
                homes = crowd * share.weight
                if homes * prompt <= site.held.capacity:
                    burden += COPY * own
                    if share.homes > 1.0 + homes:
                        burden += unit * crowd_price(share, homes, CROWDED_BY_COPIES)
            else:
                burden += unit * self._share_price(share, balance, anchor, len(pairs), resident=resident)
            sessions = site.sessions
            if (over := uncached + request.output_tokens - sessions.room) > 0.0:
                burden += over * sessions.chance * line.slope / site.pace.capacity
            each.burden = burden
            each.before = len(site.loads) + (1 if each.loads else 0)
            costs.append(each.waits + each.took + each.loads + each.presses + burden)
        return rows, costs, deepest > 0

    def _share_price(
        self, share: ReplicaShare, balance: ShareAverages, anchor: int, candidates: int, *, resident: bool
    ) -> float:
        """:meth:`ShareAverages.share_price` for the traffic of ``anchor``.

        Adapters without a home even the load at no cost, so a ``resident`` one stays longer.
        """
        fair = share.weight * balance.load
        if fair <= 0.0:
            return 0.0
        over = share.load / fair - 1.0
        if over <= (UNEVEN if resident else SLACK):
            return LEAN * over
        return balance.share_price(share, self.popular.share(anchor) * candidates if anchor else 0.0)

    def _eviction(self, key: int, site: ReplicaState) -> float:
        """The expected cost of the reload of the adapter that a load would evict."""
        if len(site.slots) < site.slots.count:
            return 0.0
        wanted = min([self.popular.of(victim) for victim in site.slots.oldest(VICTIMS)])
        return site.load_s * wanted / (wanted + self.popular.of(key) + 1.0)
