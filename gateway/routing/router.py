"""From a waiting request to a link: the shell around the pure router, one for each model."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.protocol.prompt_hash import BytesPerToken, adapter_key
from gateway.routing.replica import ReplicaHandle
from gateway.routing.shared_memory import LOCAL, SharedCounts
from gateway.telemetry.metrics import Metrics
from policy.config.deployment import Deployment
from policy.engine.step_table import step_table_of
from policy.errors import TargetError
from policy.hashing import hash_name
from policy.request import Request
from policy.routing.outlier_ejection import BreakerState
from policy.routing.router import CostEstimate, Decision, Router, Settings
from policy.routing.settings import settings_of

if TYPE_CHECKING:
    from gateway.routing.fleet import ServedModel

KEPT = 512


class ModelRouters:
    """The routers of all models of this worker, and its last decisions."""

    def __init__(
        self,
        rng: random.Random,
        shared: SharedCounts = LOCAL,
        deployment: Callable[[], Deployment | None] = lambda: None,
        metrics: Metrics | None = None,
    ) -> None:
        self._rng = rng
        self._shared = shared
        self._deployment = deployment
        self._metrics = metrics or Metrics()
        self._read: Deployment | None = None
        self._routers: dict[str, Router] = {}
        self._densities: dict[str, BytesPerToken] = {}
        self._keys: dict[str, int] = {}
        self._by_key: dict[int, Router] = {}
        self._fresh: dict[int, Decision] = {}
        self._kept: deque[tuple[float, Request, Decision]] = deque(maxlen=KEPT)
        self._clock = asyncio.get_running_loop().time

    def choose(
        self, served: ServedModel, request: Request, kept: int = 0
    ) -> tuple[ReplicaHandle, CostEstimate] | None:
        """Where ``request`` would go now, or ``None`` when it must wait here.

        ``kept`` slots of each replica are not for it.
        """
        links = []
        for link in served.links:
            breaker = link.breaker
            # Link.admissible, as far as it goes for one in good standing
            good = breaker.reachable and breaker.state is BreakerState.CLOSED and not link.full
            if good or link.admissible:
                links.append(link)
        if request.adapter:
            links = [link for link in links if link.serves(request.adapter)]
        if request.avoid:
            links = [link for link in links if link.id not in request.avoid] or links
        if kept:
            links = [link for link in links if link.bound - link.in_flight > kept]
        now = self._clock()
        router = self._of(served.name)
        if self._shared.alone:
            due = time.monotonic()
            views = [link.view if link.lone and due < link.due_at else link.look() for link in links]
        else:
            self._hear(now)
            views = [link.look() for link in links]
        decision = router.choose(request, views, now, self._rng.random())
        chosen = decision.chosen
        if chosen is None:
            return None
        if len(self._fresh) >= KEPT:  # of quotes that nobody took up
            self._fresh.clear()
        self._fresh[id(chosen)] = decision
        return links[views.index(chosen.candidate)], chosen

    def stays_s(self, served: ServedModel, request: Request) -> float:
        """How long such a request runs, by the engine model, on a replica that takes no more.

        Be that for its seats or for the pace: so beside as many as run there now.
        """
        views = [link.view for link in served.links if link.admissible or link.full]
        if not views:
            return 0.0
        view = max(views, key=lambda view: view.in_flight)
        pace = step_table_of(view.timing, self._of(served.name).settings.assumed)
        return pace.stays_s(request, view.in_flight)

    def began(self, request: Request, quote: CostEstimate) -> tuple[int, ...]:
        """``request`` was sent to the candidate of ``quote``; the hashes that are news there."""
        news = self._routers[request.model].began(request, quote.candidate, self._clock())
        if news:
            self._shared.publish(self._keys[request.model], quote.candidate.key, news)
        decision = self._fresh.pop(id(quote), None)
        if decision is not None and decision.chosen is quote:
            self._kept.append((time.time(), request, decision))
        return news

    def timed(self, request: Request, quote: CostEstimate, ttft_s: float) -> None:
        """Its first token came ``ttft_s`` after it was sent."""
        self._metrics.model(request.model).predicted(quote.total, ttft_s)
        self._of(request.model).timed(request, quote, ttft_s, self._clock())

    def paced(self, model: str, quote: CostEstimate, gap_s: float) -> None:
        """An answer ended where ``quote`` sent it; its tokens were ``gap_s`` seconds apart on average."""
        self._of(model).paced(quote.candidate, gap_s)

    def counted(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        """An engine counted its tokens."""
        density = self._densities.get(request.model) or self.density(request.model)
        density.learn(request.prompt_tokens, prompt_tokens, output_tokens, request.depths)

    def density(self, model: str) -> BytesPerToken:
        """How long prompts and answers of ``model`` are."""
        density = self._densities.get(model)
        if density is None:
            density = self._densities[model] = BytesPerToken()
        return density

    def heard(self, model: str, key: int, hashes: Sequence[int]) -> None:
        """The replica with ``key`` says which prefixes were sent to it, by whichever gateway."""
        self._of(model).learned(hashes, key, self._clock())

    def holds(self, model: str, key: int, loaded: Iterable[str], refused: Iterable[str]) -> None:
        """The replica with ``key`` says which adapters it has ``loaded``, and which it could not load."""
        self._of(model).holds(
            [adapter_key(model, name) for name in loaded], [adapter_key(model, name) for name in refused], key
        )

    def forget(self, model: str, key: int) -> None:
        """The replica with ``key`` is gone, or started anew."""
        self._of(model).forget(key)

    def describe(self, count: int) -> list[dict[str, Any]]:
        """The last ``count`` decisions, the newest first, with their candidates in seconds."""
        last = list(self._kept)[: -count - 1 : -1]
        return [_described(*kept) for kept in last]

    def explain(self, request: Request) -> bytes:
        """The last decision on ``request`` as JSON, without line breaks; ``{}`` if it is no longer kept."""
        for kept in reversed(self._kept):
            if kept[1] is request:
                return msgspec.json.encode(_described(*kept))
        return b"{}"

    def _hear(self, now: float) -> None:
        for model_key, replica_key, hashes in self._shared.news():
            router = self._by_key.get(model_key)
            if router is not None:
                router.learned(hashes, replica_key, now)

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


def _settings(deployment: Deployment | None, model: str) -> Settings:
    """What the document says of routing to ``model``; nothing of a model that it does not name."""
    try:
        return Settings() if deployment is None else settings_of(deployment.model(model))
    except TargetError:  # the controller still has it
        return Settings()


def _described(at: float, request: Request, decision: Decision) -> dict[str, Any]:
    assert decision.chosen is not None
    return {
        "at": round(at, 3),
        "model": request.model,
        "tenant": request.tenant,
        "adapter": request.adapter,
        "prompt_tokens": request.prompt_tokens,
        "replica": decision.chosen.candidate.id,
        "reason": decision.reason,
        "candidates": [
            {
                "replica": quote.candidate.id,
                "total_s": round(quote.total, 6),
                "wait_s": round(quote.wait, 6),
                "prefill_s": round(quote.prefill, 6),
                "adapter_s": round(quote.adapter, 6),
                "pressure_s": round(quote.pressure, 6),
                "burden_s": round(quote.burden, 6),
                "uncached_tokens": quote.uncached,
            }
            for quote in decision.quotes
        ],
    }
