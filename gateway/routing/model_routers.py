"""The routers of all models in one worker, with what workers report to each other and the last decisions."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from gateway.protocol.prompt_features import BytesPerToken, adapter_key
from gateway.routing.shared_counters import EVICTED, HELD, LOCAL, LOSS, SharedCounts
from gateway.telemetry.metrics import WorkerMetrics
from policy.config.deployment import Deployment
from policy.errors import TargetError
from policy.hashing import hash_name
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate
from policy.routing.engine_prefix_index import MAX_NAMES, PrefixIndexUpdate
from policy.routing.router import PickResult, Router
from policy.routing.settings import RoutingSettings, settings_of
from policy.wire.load_stream import CachedPrefix, LoadReport

# How many decisions are kept for explanations.
KEPT: Final = 512
# Requests that wait are sent together, and look for their decisions when all are made.
RECENT: Final = 64
# How many measured times are kept; those of estimates that are gone are overwritten or forgotten together.
MAX_TIMED: Final = 4 * KEPT
# For a prefix that a server held, and holds no more.
GONE: Final = -1
_COST_PARTS = ("total", "wait", "prefill", "adapter", "pressure", "burden")


class ModelRouters:
    """The routers of all models of this worker, its last decisions, and estimates of lengths by model."""

    def __init__(
        self,
        rng: random.Random,
        shared: SharedCounts = LOCAL,
        deployment: Callable[[], Deployment | None] = lambda: None,
        metrics: WorkerMetrics | None = None,
        lost: Callable[[int, int, float], None] = lambda fingerprint, replica, at: None,
    ) -> None:
        self._rng = rng
        self._shared = shared
        self._deployment = deployment
        self._metrics = metrics or WorkerMetrics()
        self._lost = lost
        self._read: Deployment | None = None
        self._routers: dict[str, Router] = {}
        self.densities: defaultdict[str, BytesPerToken] = defaultdict(BytesPerToken)
        self._keys: dict[str, int] = {}
        self._by_key: dict[int, Router] = {}
        # The tokens of prefixes that this worker named to servers with KV events, by the servers' keys.
        self._named: dict[int, dict[int, int]] = {}
        self._fresh: dict[int, PickResult] = {}
        self._kept: deque[tuple[float, Request, PickResult]] = deque(maxlen=KEPT)
        # The measured TTFT by the identity of the estimate.
        self._ttft_s: dict[int, float] = {}
        self._clock = asyncio.get_running_loop().time

    def choose(self, request: Request, candidates: list[Candidate], at: float) -> CostEstimate | None:
        """Where ``request`` would go now, or ``None`` when it should wait."""
        router = self._of(request.model)
        if not self._shared.alone:
            self._read_news(at)
        decision = router.choose(request, candidates, at, self._rng.random())
        chosen = decision.chosen
        if chosen is None:
            return None
        if len(self._fresh) >= KEPT:  # estimates that led to no request
            self._fresh.clear()
        self._fresh[id(chosen)] = decision
        return chosen

    def loss_s(self, request: Request, candidate: Candidate, replicas: int, at: float) -> float:
        """Seconds of prefill that it is expected to lose if it does not go to this one of ``replicas``."""
        return self._of(request.model).loss_s(request, candidate, replicas, at)

    def service_s(self, request: Request, candidates: list[Candidate]) -> float:
        """How long such a request runs on the fullest of ``candidates``, by the performance model."""
        return self._of(request.model).service_s(request, candidates)

    def longest_s(self, request: Request, candidate: Candidate) -> float:
        """How long ``request`` runs there if its answer is a long one."""
        return self._of(request.model).longest_s(request, candidate)

    def remaining_s(self, request: Request, candidate: Candidate, ran_s: float) -> float:
        """How long a request that has run for ``ran_s`` seconds there is expected to run on."""
        return self._of(request.model).remaining_s(request, candidate, ran_s)

    def produced_tokens(self, request: Request, candidate: Candidate, ran_s: float) -> int:
        """How much of its answer is expected after ``ran_s`` seconds; 0 where it is not known how fast."""
        router = self._of(request.model)
        if not router.service_s(request, [candidate]):
            return 0
        first_s = router.stays_s(request, candidate, 0)
        produced = int(max(0.0, ran_s - first_s) / (router.stays_s(request, candidate, 1) - first_s))
        return min(produced, request.limit_tokens) if request.limit_tokens else produced

    def began(self, request: Request, quote: CostEstimate, at: float) -> tuple[int, ...]:
        """``request`` was sent to the candidate of ``quote``; returns the hashes that are new there."""
        new_hashes = self._routers[request.model].began(request, quote.candidate, at)
        if new_hashes:
            self._shared.publish(self._keys[request.model], quote.candidate.key, new_hashes)
        decision = self._fresh.pop(id(quote), None)
        if decision is not None and decision.chosen is quote:
            self._kept.append((time.time(), request, decision))
            self._ttft_s.pop(id(quote), None)  # of an estimate that is gone
        return new_hashes

    def timed(self, request: Request, quote: CostEstimate, ttft_s: float, at: float) -> None:
        """Its first token came ``ttft_s`` seconds after it was sent."""
        self._metrics.model(request.model).predicted(quote.total, ttft_s)
        if len(self._ttft_s) >= MAX_TIMED:
            self._ttft_s.clear()
        self._ttft_s[id(quote)] = ttft_s
        self._of(request.model).timed(request, quote, ttft_s, at)

    def paced(self, model: str, quote: CostEstimate, gap_s: float) -> None:
        """An answer ended where ``quote`` sent it; its tokens were ``gap_s`` seconds apart on average."""
        self._of(model).paced(quote.candidate, gap_s)

    def counted(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        self.densities[request.model].learn(
            request.prompt_bytes, prompt_tokens, output_tokens, request.limit_tokens
        )

    def learn_prefixes(self, model: str, key: int, line: LoadReport) -> None:
        """The replica with ``key`` reports the prefixes that were sent to it, and what its engine holds."""
        router, at = self._of(model), self._clock()
        if line.prefixes:
            router.learned(line.prefixes, key, at)
        if line.held or line.gone or line.reset:
            router.cached(line.held, line.gone, key, at, reset=line.reset)

    def learn_cached(self, model: str, key: int, news: PrefixIndexUpdate) -> None:
        """The events of the external server with ``key`` say what its engine holds; other workers hear of it.

        Each worker knows the prefixes that it named itself, and takes the others' word for theirs.
        """
        self._of(model).cached(news.held, news.gone, key, self._clock(), reset=news.reset)
        named = self._named.setdefault(key, {})
        if news.reset or len(named) > 2 * MAX_NAMES:
            named.clear()
        for prefix in news.held:
            tokens = prefix.tokens + prefix.host_tokens
            if named.get(prefix.hash) != tokens:
                named[prefix.hash] = tokens
                self._shared.publish_cached(key, prefix.hash, tokens, held=True)
        for prefix in news.gone:
            # Without tokens: it is not named here, which says nothing.
            if not prefix.tokens:
                named.pop(prefix.hash, None)
            elif named.get(prefix.hash) != GONE:
                named[prefix.hash] = GONE
                self._shared.publish_cached(key, prefix.hash, prefix.tokens, held=False)

    def set_adapters(self, model: str, key: int, loaded: Iterable[str], refused: Iterable[str]) -> None:
        """The replica with ``key`` reports the adapters that it has loaded and could not load."""
        self._of(model).holds(
            [adapter_key(model, name) for name in loaded], [adapter_key(model, name) for name in refused], key
        )

    def forget(self, model: str, key: int) -> None:
        """The replica with ``key`` is gone or was restarted."""
        self._of(model).forget(key)
        self._named.pop(key, None)

    def describe(self, count: int) -> list[dict[str, Any]]:
        """The last ``count`` decisions, the newest first, with their candidates in seconds."""
        last = list(self._kept)[: -count - 1 : -1]
        return [self._described(*kept) for kept in last]

    def explain(self, request: Request) -> bytes:
        """The last decision on ``request`` as JSON, without line breaks; ``{}`` if it is no longer kept."""
        for kept in reversed(self._kept):
            if kept[1] is request:
                return msgspec.json.encode(self._described(*kept))
        return b"{}"

    def decision_on(self, request: Request) -> PickResult | None:
        """The last decision on ``request``, if it was made just now; ``None`` otherwise."""
        if self._kept and self._kept[-1][1] is request:
            return self._kept[-1][2]
        found = (kept[2] for kept in islice(reversed(self._kept), RECENT) if kept[1] is request)
        return next(found, None)

    def _read_news(self, now: float) -> None:
        for model_key, replica_key, hashes in self._shared.published_by_others():
            router = self._by_key.get(model_key)
            if router is not None:
                router.learned(hashes, replica_key, now)
            elif model_key >> 32 == LOSS:
                for fingerprint in hashes:
                    self._lost(fingerprint, replica_key, float(model_key & 0xFFFF_FFFF))
            elif model_key >> 32 in (HELD, EVICTED):
                self._learn_cached_elsewhere(model_key, replica_key, hashes, now)

    def _learn_cached_elsewhere(
        self, model_key: int, replica_key: int, hashes: Sequence[int], now: float
    ) -> None:
        """Another worker named prefixes of a server that both follow."""
        tokens, own = model_key & 0xFFFF_FFFF, self._named.get(replica_key, {})
        found = [CachedPrefix(value, tokens) for value in hashes if value not in own]
        held, gone = (found, []) if model_key >> 32 == HELD else ([], found)
        for router in self._routers.values():
            router.cached(held, gone, replica_key, now, reset=False)

    def _described(self, at: float, request: Request, decision: PickResult) -> dict[str, Any]:
        assert decision.chosen is not None
        ttft_s = self._ttft_s.get(id(decision.chosen))
        return {
            "at": round(at, 3),
            "model": request.model,
            "tenant": request.tenant,
            "adapter": request.adapter,
            "prompt_tokens": request.prompt_tokens,
            "replica": decision.chosen.candidate.id,
            "reason": decision.reason,
            "ttft_s": None if ttft_s is None else round(ttft_s, 6),
            "candidates": [
                {
                    "replica": quote.candidate.id,
                    **{f"{part}_s": round(getattr(quote, part), 6) for part in _COST_PARTS},
                    "uncached_tokens": quote.uncached,
                    "cached_tokens": quote.cached,
                }
                for quote in decision.quotes
            ],
        }

    def _of(self, model: str) -> Router:
        deployment = self._deployment()
        if deployment is not self._read:
            self._read = deployment
            for name, router in self._routers.items():
                router.settings = _settings(deployment, name)
        found = self._routers.get(model)
        if found is None:
            found = self._routers[model] = Router(_settings(self._read, model))
            key = self._keys[model] = hash_name(model)
            self._by_key[key] = found
        return found


def _settings(deployment: Deployment | None, model: str) -> RoutingSettings:
    """The routing settings of ``model``; defaults for one that the deployment does not name."""
    try:
        return RoutingSettings() if deployment is None else settings_of(deployment.model(model))
    except TargetError:  # the controller still has it
        return RoutingSettings()
