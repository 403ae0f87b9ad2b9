"""Routing policies beside each other: the gateway's own, and what others do, as their documents say it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policy.hashing import rendezvous
from policy.request import Request
from policy.routing.router import Candidate, CostEstimate, Router, Settings


class Rival:
    """A policy; what it need not know of a request's life it does not overwrite."""

    def __init__(self, slots: int) -> None:
        """``slots`` is how many adapters a replica holds."""

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        """One of ``candidates``; equals are chosen between by ``draw`` in [0, 1)."""
        raise NotImplementedError

    def pending(self, request: Request) -> int:
        """Prompt tokens that the request just chosen for is believed to have computed there."""
        return request.prompt_tokens

    def began(self, request: Request, candidate: Candidate, at: float) -> tuple[int, ...]:
        """It was sent; returns what other workers of the host are told."""
        return ()

    def learned(self, news: tuple[int, ...], key: int, at: float) -> None:
        """Another worker said this of the replica with ``key``."""

    def forget(self, key: int) -> None:
        """The replica with ``key`` was restarted."""


class Ours(Rival):
    """The router that the gateway runs."""

    def __init__(self, slots: int) -> None:
        self.router = Router(Settings(slots=slots))
        self.quote: CostEstimate | None = None

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        self.quote = self.router.choose(request, candidates, at, draw).chosen
        assert self.quote is not None
        return self.quote.candidate

    def pending(self, request: Request) -> int:
        assert self.quote is not None
        return self.quote.uncached

    def began(self, request: Request, candidate: Candidate, at: float) -> tuple[int, ...]:
        return self.router.began(request, candidate, at)

    def learned(self, news: tuple[int, ...], key: int, at: float) -> None:
        self.router.learned(news, key, at)

    def forget(self, key: int) -> None:
        self.router.forget(key)


class RoundRobin(Rival):
    """One after the other."""

    def __init__(self, slots: int) -> None:
        self._turn = 0

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        self._turn += 1
        return candidates[self._turn % len(candidates)]


class LeastLoaded(Rival):
    """The fewest requests in flight, any of those."""

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        least = min(candidate.in_flight for candidate in candidates)
        best = [candidate for candidate in candidates if candidate.in_flight == least]
        return best[int(draw * len(best))]


class ConsistentHash(Rival):
    """The home by hash, whatever its load."""

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        item = request.prefix[-1] if request.prefix else request.adapter_key
        return max(candidates, key=lambda candidate: rendezvous(item, candidate.key))


class CacheAware(LeastLoaded):
    """sglang's: where it was sent before; the least loaded if it is new, or if loads differ by much."""

    def __init__(self, slots: int) -> None:
        self._homes: dict[int, int] = {}

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Candidate:
        item = request.prefix[-1] if request.prefix else request.adapter_key
        home = self._homes.get(item)
        for candidate in candidates:
            if candidate.key == home and not self._spills(candidate, candidates):
                return candidate
        best = super().choose(request, candidates, at, draw)
        self._homes.setdefault(item, best.key)
        return best

    def _spills(self, home: Candidate, candidates: Sequence[Candidate]) -> bool:
        loads = [candidate.in_flight for candidate in candidates]
        return max(loads) - min(loads) > 32 and max(loads) > 1.5 * min(loads)


class Spilling(CacheAware):
    """smg's: from a home with half more than the mean, and with more than chance makes of it, to the least
    loaded; chance is two standard deviations of that mean, never under four requests (64 at most)."""

    def _spills(self, home: Candidate, candidates: Sequence[Candidate]) -> bool:
        mean = sum(candidate.in_flight for candidate in candidates) / len(candidates)
        beyond = home.in_flight - mean
        return beyond > min(64.0, max(4.0, 2.0 * math.sqrt(mean))) and home.in_flight > 1.5 * mean


POLICIES: dict[str, type[Rival]] = {
    "tidegate": Ours,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "consistent hash": ConsistentHash,
    "sglang cache aware": CacheAware,
    "smg cache aware": Spilling,
}
