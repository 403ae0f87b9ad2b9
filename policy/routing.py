"""Which replica takes a request: the one that is predicted to give it its first token soonest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from policy.engine_model import Timing
from policy.request import Request


@dataclass(slots=True, eq=False)
class Candidate:
    """A replica as the router sees it; whoever owns the connection to it keeps it true.

    ``key`` is a 64-bit hash of ``id`` that every process computes alike. ``in_flight`` counts
    requests that are there now, ``bound`` how many it takes (0: none stated), ``pending_tokens`` their
    prompt tokens that are not computed yet, ``begun`` the requests ever sent there by this host.
    ``kv_used`` is a fraction. ``timing`` is what the replica said of its own speed, if it did.
    """

    id: str
    key: int
    bound: int = 0
    in_flight: int = 0
    pending_tokens: int = 0
    begun: int = 0
    kv_used: float = 0.0
    timing: Timing | None = None


class Quote(NamedTuple):
    """Predicted seconds to the first token at one candidate, term by term."""

    candidate: Candidate
    wait: float = 0.0
    prefill: float = 0.0
    adapter: float = 0.0
    pressure: float = 0.0

    @property
    def total(self) -> float:
        """The predicted time to the first token in seconds."""
        return self.wait + self.prefill + self.adapter + self.pressure


class Decision(NamedTuple):
    """Where a request goes and why; no ``chosen`` means that it waits in the gateway."""

    chosen: Quote | None
    quotes: tuple[Quote, ...]
    reason: str


class Router:
    """The routing state of one model in one gateway worker."""

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> Decision:
        """The best of ``candidates``; equals are chosen between by ``draw`` in [0, 1)."""
        quotes = tuple(
            Quote(c, wait=c.in_flight / (c.bound or 256))
            for c in candidates
            if not c.bound or c.in_flight < c.bound
        )
        if not quotes:
            return Decision(None, quotes, "no candidate has room")
        least = min(quote.total for quote in quotes)
        best = [quote for quote in quotes if quote.total == least]
        return Decision(best[int(draw * len(best))], quotes, "least predicted time to first token")

    def began(self, request: Request, candidate: Candidate, at: float) -> tuple[int, ...]:
        """``request`` was sent there; returns the prefix hashes that are news to other gateways."""
        return ()

    def learned(self, hashes: Sequence[int], key: int, at: float) -> None:
        """Another gateway says that the replica with ``key`` has these prefixes."""

    def forget(self, key: int) -> None:
        """The replica with ``key`` is gone or was restarted: nothing is cached there."""

    def timed(self, request: Request, quote: Quote, ttft_s: float, at: float) -> None:
        """The first token came ``ttft_s`` after the request was sent to ``quote.candidate``."""
