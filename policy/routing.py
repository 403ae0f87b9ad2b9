"""Which replica takes a request: the one that is predicted to give it its first token soonest.

The prediction is :mod:`policy.quoting`'s; here it is weighed against what each choice costs others.

One module though over 300 lines: a choice, what it begins, and what is learned from it are one state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple

from policy.affinity import Balance, Popularity, Recent, balance_of, rendezvous
from policy.engine_model import Timing
from policy.pace import GENERIC
from policy.quoting import Candidate, Quote, measure
from policy.request import Request
from policy.residual import Line
from policy.site import Site

__all__ = ["Candidate", "Decision", "Quote", "Router", "Settings"]


class Decision(NamedTuple):
    """Where a request goes and why; no ``chosen`` means that it waits in the gateway."""

    chosen: Quote | None
    quotes: tuple[Quote, ...]
    reason: str


@dataclass(slots=True, frozen=True)
class Settings:
    """What a deployment says of a model's routing.

    ``assumed`` times a replica that tells nothing itself. ``start_s`` is how long a replica may have a
    request wait before it computes it, ``itl_s`` how long a step may get, both in seconds; ``slots`` how
    many adapters a replica holds.
    """

    assumed: Timing = GENERIC
    start_s: float = math.inf
    itl_s: float = math.inf
    slots: int = 8


NO_ROOM = "no candidate has room"
TOO_LATE = "no candidate would start it in time"
CACHED = "its prefix is cached there"
RESIDENT = "its adapter is loaded there"
AWAY = "away from what is cached, which would take longer or has more than its share"
HOME = "a home for a new prefix"
SOONEST = "least predicted time to first token"

# How many candidates are quoted; of more than that, a shortlist.
MOST_QUOTES = 8
MAX_SITES = 1024
# A replica that was no candidate for so long owes nothing for that time.
ABSENT_S = 5.0
# What the replica of a session's last request may be slower, in seconds.
SESSION_S = 0.01
SPAN = 4096
# From this factor on a replica is due less of the traffic, not only what is dear to wait for.
SLOW = 1.5
EVICTION = 1.0


# A tuple made directly: the constructor with its names costs a router half a microsecond a candidate.
_quote = tuple.__new__
# candidate, site, terms, own prefill, uncached tokens, modelled seconds, age
_Row = tuple[Candidate, Site, tuple[float, ...], float, int, float, int]


class _Found:
    """What quoting all candidates showed: the deepest that any holds, and the range of the prefills."""

    __slots__ = ("anchor", "cold", "deepest", "former", "most", "resident", "warm_s", "youngest")

    def __init__(self, adapter_key: int) -> None:
        self.anchor = adapter_key
        self.deepest = 0
        self.former: Site | None = None  # it had this, and had the least to do since
        self.youngest = math.inf
        self.resident = False
        self.most = self.cold = 0.0
        self.warm_s = math.inf


class Router:
    """The routing state of one model in one gateway worker."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._sites: dict[int, Site] = {}
        self._line = Line()
        self._popular = Popularity(SPAN)
        self._sessions = Recent(SPAN)
        self._cold_s = 0.0
        self._hash_tokens = 128.0

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Decision:
        """The best of ``candidates``; equals are chosen between by ``draw`` in [0, 1)."""
        pairs = []
        shares = []
        itl_s = self.settings.itl_s
        for candidate in candidates:
            site = self._site(candidate, at)
            share = site.share
            if candidate.begun != share.seen:
                share.take(candidate.begun)
            shares.append(share)
            count = candidate.in_flight
            if (candidate.bound and count >= candidate.bound) or (
                count and itl_s < math.inf and not self._keeps_pace(candidate, site)
            ):
                continue
            pairs.append((candidate, site))
        if not pairs:
            return Decision(None, (), NO_ROOM)
        balance = balance_of(shares, self._popular.worth)
        if len(pairs) > MOST_QUOTES:
            pairs = self._shortlist(request, pairs, at)
        quotes, costs = self._quotes(request, pairs, balance, at)
        if (limit := self.settings.start_s) < math.inf:
            for i, quote in enumerate(quotes):
                if quote.wait > limit and quote.candidate.in_flight:
                    costs[i] = math.inf
        least = min(costs)
        if least == math.inf:
            return Decision(None, tuple(quotes), TOO_LATE)
        if request.session or costs.count(least) > 1:
            chosen = self._among(request, quotes, costs, draw)
        else:
            chosen = quotes[costs.index(least)]
        return Decision(chosen, tuple(quotes), self._reason(request, chosen, quotes))

    def began(self, request: Request, candidate: Candidate, at: float) -> tuple[int, ...]:
        """``request`` was sent there; returns the hashes that are news to other gateways."""
        site = self._site(candidate, at)
        if not candidate.pending_tokens:  # it turns to this one with its next step
            candidate.turned_at = at + 0.5 * self._step_s(candidate, site)
        news: tuple[int, ...] = ()
        prefix = request.prefix
        if prefix:
            depth = site.held.depth(prefix, at)
            tokens = request.prompt_tokens
            if depth:
                self._popular.add(prefix[depth - 1])
                tokens = max(tokens - request.depths[depth - 1], 0)
            else:
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
                news = (*news, request.adapter_key)
        if request.session:
            self._sessions.put(request.session, candidate.key)
        return news

    def learned(self, hashes: Sequence[int], key: int, at: float) -> None:
        """Another gateway says that the replica with ``key`` has these prefixes and adapters."""
        site = self._sites.get(key) or self._open(key, None)
        # A replica tells what this worker sent there, too.
        prefix = [value for value in hashes if not value & 1 and value not in site.held]
        if prefix:
            # Who continues what is known says its tail alone.
            if len(prefix) > 1:
                site.share.homes += 1.0
                self._relieve(prefix, site, at)
            site.held.touch(prefix, int(self._hash_tokens * len(prefix)), at)
        for value in hashes:
            if value & 1:
                site.slots.use(value)

    def forget(self, key: int) -> None:
        """The replica with ``key`` is gone or was restarted: nothing is cached there."""
        self._sites.pop(key, None)

    def timed(self, request: Request, quote: Quote, ttft_s: float, at: float) -> None:
        """The first token came ``ttft_s`` after the request was sent to ``quote.candidate``."""
        site = self._sites.get(quote.candidate.key)
        if site is None or quote.modelled <= 0.0 or ttft_s <= 0.0:
            return
        if quote.adapter:  # what it took beyond the rest was the load
            rest = quote.total - quote.adapter
            site.load_s += 0.2 * (max(ttft_s - rest, 0.0) - site.load_s)
            return
        line = self._line
        if quote.uncached < request.prompt_tokens and self._was_gone(request, quote, site, ttft_s):
            return  # it says nothing of how fast the replica is
        site.residual.learn(line.of(quote.modelled), ttft_s, line.usual_s, at)
        line.learn(quote.modelled, ttft_s)

    def _was_gone(self, request: Request, quote: Quote, site: Site, ttft_s: float) -> bool:
        """Whether what was believed cached was not: it shows where a whole prefill takes twice as long."""
        whole = site.pace.prefill_s(request.prompt_tokens, 0.0, 0) - site.pace.prefill_s(
            quote.uncached, 0.0, 0
        )
        without = quote.total + self._line.slope * whole
        if without <= 2.0 * quote.total:
            return False
        if ttft_s <= 0.5 * (quote.total + without):
            site.held.survived(quote.age)
            return False
        site.held.was_gone(quote.age)
        site.held.given += request.prompt_tokens - quote.uncached
        return True

    def _step_s(self, candidate: Candidate, site: Site) -> float:
        """Seconds of the step that is under way where nothing is prefilled; 0 where nothing runs."""
        if not candidate.in_flight:
            return 0.0
        pace = site.pace
        running = min(candidate.in_flight, pace.seats)
        return pace.step_s(running, candidate.kv_used * pace.kv_tokens, running)

    def _site(self, candidate: Candidate, at: float) -> Site:
        site = self._sites.get(candidate.key)
        if site is None:
            site = self._open(candidate.key, candidate.timing)
        elif site.timing is not candidate.timing:
            site.time(candidate.timing, self.settings.assumed)
        if at - site.seen_at > ABSENT_S:
            self._level(site, at)
        site.seen_at = at
        site.count(candidate.in_flight, candidate.pending_tokens, candidate.kv_used)
        return site

    def _open(self, key: int, timing: Timing | None) -> Site:
        if len(self._sites) >= MAX_SITES:
            del self._sites[next(iter(self._sites))]
        site = self._sites[key] = Site(key, timing, self.settings.assumed, self.settings.slots)
        return site

    def _level(self, site: Site, at: float) -> None:
        """Lift the load of a replica that came, or came back, to the mean of those that were there."""
        present = [
            other.share
            for other in self._sites.values()
            if other is not site and at - other.seen_at < ABSENT_S
        ]
        weights = sum(share.weight for share in present)
        if weights:
            part = site.share.weight / weights
            site.share.load = max(site.share.load, part * sum(share.load for share in present))
            site.share.homes = max(site.share.homes, part * sum(share.homes for share in present))

    def _relieve(self, prefix: Sequence[int], taker: Site, at: float) -> None:
        """What has a home got another: the first can now give away a part of it."""
        for site in self._sites.values():
            if site is not taker and (depth := site.held.depth(prefix, at)):
                part = self._popular.share(prefix[depth - 1]) * len(self._sites)
                site.share.takers = [*site.share.takers[-3:], (taker.share, part)]

    def _keeps_pace(self, candidate: Candidate, site: Site) -> bool:
        """Whether steps stay as short as promised with one more running."""
        if self.settings.itl_s == math.inf:
            return True
        running = candidate.in_flight + 1
        step = site.pace.step_s(running, candidate.kv_used * site.pace.kv_tokens, running)
        return self._line.slope * step <= self.settings.itl_s

    def _shortlist(
        self, request: Request, pairs: list[tuple[Candidate, Site]], at: float
    ) -> list[tuple[Candidate, Site]]:
        """Those that hold most of it, the least loaded, and those that everybody would call its home."""
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

    def _quotes(
        self, request: Request, pairs: list[tuple[Candidate, Site]], balance: Balance, at: float
    ) -> tuple[list[Quote], list[float]]:
        """What each would cost the request, and that together with what it would cost others."""
        prefix, depths, prompt = request.prefix, request.depths, max(request.prompt_tokens, 1)
        line, key = self._line, request.adapter_key
        found = _Found(key)
        rows: list[_Row] = []
        for candidate, site in pairs:
            uncached, age = prompt, 0
            if prefix:
                held = site.held
                if depth := held.depth(prefix, at):
                    uncached, age = max(prompt - depths[depth - 1], 1), held.age(prefix[depth - 1])
                    if depth > found.deepest:
                        found.deepest, found.anchor = depth, prefix[depth - 1]
                elif prefix[0] in held and (old := held.age(prefix[0])) < found.youngest:
                    found.youngest, found.former = float(old), site
            slope, fixed_s = line.slope, line.fixed_s
            if (factor := site.residual.factor(at)) != 1.0:
                slope, fixed_s = slope * factor, fixed_s * factor
            weight = site.pace.capacity / factor if factor > SLOW else site.pace.capacity
            site.share.weight = weight
            terms, own, modelled = measure(request, candidate, site, uncached, slope=slope, fixed_s=fixed_s)
            # As long as on the quickest: measured by a slow one, evenness would be worth any time.
            found.most = max(found.most, weight)
            found.cold = max(found.cold, own * weight)
            found.warm_s = min(found.warm_s, own)
            if key and key in site.slots:
                found.resident = True
            rows.append((candidate, site, terms, own, uncached, modelled, age))
        return self._priced(request, rows, found, balance)

    def _priced(
        self, request: Request, rows: list[_Row], found: _Found, balance: Balance
    ) -> tuple[list[Quote], list[float]]:
        prefix, key = request.prefix, request.adapter_key
        former, cold_s = found.former, found.cold / found.most
        if found.deepest:
            former = None
            if cold_s > found.warm_s:
                self._cold_s += (0.05 if self._cold_s else 1.0) * (cold_s - found.warm_s - self._cold_s)
            cold_s = self._cold_s
        known = found.deepest > 0 or former is not None
        new = not known and (bool(prefix) or (key != 0 and not found.resident))
        leverage = self._popular.share(found.anchor) * len(rows) if found.anchor else 0.0
        least, dear = balance.least, balance.unit
        quotes, costs = [], []
        for candidate, site, terms, own, uncached, modelled, age in rows:
            unit = cold_s
            # Whoever is there stands still while a prompt is computed; a copy takes KV cache besides.
            burden = own - own / (1.0 + candidate.in_flight)
            if key:
                unit += site.load_s
                if key not in site.slots:
                    burden += self._eviction(key, site)
            if new or (prefix and not age and uncached >= request.prompt_tokens and site is not former):
                burden += unit * (site.share.due - least) * dear
                if not new:
                    burden += own
            else:
                burden += unit * balance.share_price(site.share, leverage)
            costs.append(sum(terms) + burden)
            quotes.append(_quote(Quote, (candidate, *terms, burden, uncached, modelled, age)))
        return quotes, costs

    def _eviction(self, key: int, site: Site) -> float:
        """The reload of the adapter that a load pushes out, as likely as it is asked for again."""
        victim = site.slots.next_out
        if victim is None:
            return 0.0
        wanted = self._popular.of(victim)
        return site.load_s * EVICTION * wanted / (wanted + self._popular.of(key) + 1.0)

    def _among(self, request: Request, quotes: list[Quote], costs: list[float], draw: float) -> Quote:
        """One of equals, or the replica of the session's last request if it is hardly worse."""
        if request.session and (last := self._sessions.get(request.session)) is not None:
            costs = [
                cost - SESSION_S if quote.candidate.key == last else cost
                for quote, cost in zip(quotes, costs, strict=True)
            ]
        least = min(costs)
        best = [quote for quote, cost in zip(quotes, costs, strict=True) if cost == least]
        if len(best) == 1:
            return best[0]
        if item := request.prefix[0] if request.prefix else request.adapter_key:
            return max(best, key=lambda quote: rendezvous(item, quote.candidate.key))
        return best[int(draw * len(best))]

    def _reason(self, request: Request, chosen: Quote, quotes: list[Quote]) -> str:
        if request.prefix:
            if chosen.uncached < request.prompt_tokens:
                return CACHED
            return AWAY if any(quote.uncached < chosen.uncached for quote in quotes) else HOME
        if request.adapter_key and not chosen.adapter:
            return RESIDENT
        return SOONEST
