"""The routers that Tidegate's is compared with: round robin, least loaded, and prefix routing as peers do it.

What no replica has a free sequence for waits in the engine, not in the gateway. Each remembers every prompt
that it sent, without a limit; with limits they would forget what an engine still holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from policy.hashing import rendezvous
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate
from policy.routing.router import PickResult, Router
from policy.routing.settings import RoutingSettings


class BaselineRouter(Router):
    """A router of another rule, which is in :meth:`pick`. It learns nothing from the times of requests."""

    def choose(self, request: Request, candidates: Sequence[Candidate], at: float, draw: float) -> PickResult:
        if not candidates:
            return PickResult(None, (), "no candidate")
        picked = self.pick(request, candidates, draw)
        return PickResult(CostEstimate(picked, uncached=request.prompt_tokens), (), "")

    def began(self, request: Request, candidate: Candidate, at: float) -> tuple[int, ...]:
        return ()

    def pick(self, request: Request, candidates: Sequence[Candidate], draw: float) -> Candidate:
        raise NotImplementedError


class RoundRobinRouter(BaselineRouter):
    """Each replica in turn."""

    def __init__(self, settings: RoutingSettings) -> None:
        super().__init__(settings)
        self._sent = 0

    def pick(self, request: Request, candidates: Sequence[Candidate], draw: float) -> Candidate:
        self._sent += 1
        return candidates[self._sent % len(candidates)]


class LeastLoadedRouter(BaselineRouter):
    """The replica with the fewest requests in flight, ties at random."""

    def pick(self, request: Request, candidates: Sequence[Candidate], draw: float) -> Candidate:
        return least_loaded(candidates, draw)


class SessionHashRouter(BaselineRouter):
    """Consistent hashing of the session, as vllm-router's and production-stack's session routing."""

    def pick(self, request: Request, candidates: Sequence[Candidate], draw: float) -> Candidate:
        return max(candidates, key=lambda each: rendezvous(request.session, each.key))


class _PrefixRouter(BaselineRouter):
    """One that knows which prompts went where."""

    def __init__(self, settings: RoutingSettings) -> None:
        super().__init__(settings)
        self._seen: dict[int, set[int]] = {}

    def began(self, request: Request, candidate: Candidate, at: float) -> tuple[int, ...]:
        self._seen.setdefault(candidate.key, set()).update(request.prefix)
        return ()

    def matched(self, request: Request, candidate: Candidate) -> float:
        """The fraction of the prompt that went to the replica before."""
        seen, depth = self._seen.get(candidate.key, ()), 0
        for value, tokens in zip(request.prefix, request.depths, strict=True):
            if value not in seen:
                break
            depth = tokens
        return depth / request.prompt_tokens


# CacheAwareConfig::default() of SGLang's router and of vllm-router, its fork.
CACHE_THRESHOLD = 0.5
BALANCE_ABS_THRESHOLD = 32
BALANCE_REL_THRESHOLD = 1.1


class CacheAwareRouter(_PrefixRouter):
    """``cache_aware`` of SGLang's router and vllm-router, with a tree of the prompts of each replica.

    While requests in flight are balanced, a prompt goes where most of it went before, if that is more than
    half; otherwise to the least loaded replica. Ties are broken at random, in its favour.
    """

    def pick(self, request: Request, candidates: Sequence[Candidate], draw: float) -> Candidate:
        counts = [each.in_flight for each in candidates]
        most, least = max(counts), min(counts)
        if most - least > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * least:
            return least_loaded(candidates, draw)
        matches = [self.matched(request, each) for each in candidates]
        best = max(matches)
        if best <= CACHE_THRESHOLD:
            return least_loaded(candidates, draw)
        found = [each for each, match in zip(candidates, matches, strict=True) if match == best]
        return found[int(draw * len(found))]


# Weights of llm-d's prefix-aware scheduling profile.
PREFIX_WEIGHT, QUEUE_WEIGHT, KV_WEIGHT = 3.0, 1.0, 1.0


class WeightedScoresRouter(_PrefixRouter):
    """The scheduling profile of llm-d: scores from 0 to 1 for prefix, queue and KV cache, weighted and added.

    The queue score is by requests in flight, from the most (0) to the least (1).
    """

    def pick(self, request: Request, candidates: Sequence[Candidate], draw: float) -> Candidate:
        counts = [each.in_flight for each in candidates]
        most, least = max(counts), min(counts)
        scores = [
            PREFIX_WEIGHT * self.matched(request, each)
            + QUEUE_WEIGHT * ((most - each.in_flight) / (most - least) if most > least else 1.0)
            + KV_WEIGHT * (1.0 - each.kv_used)
            for each in candidates
        ]
        best = max(scores)
        found = [each for each, score in zip(candidates, scores, strict=True) if score == best]
        return found[int(draw * len(found))]


def least_loaded(candidates: Sequence[Candidate], draw: float) -> Candidate:
    """One of those with the fewest requests in flight, by ``draw`` in [0, 1)."""
    least = min(each.in_flight for each in candidates)
    found = [each for each in candidates if each.in_flight == least]
    return found[int(draw * len(found))]
