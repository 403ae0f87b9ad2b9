"""Spillover: requests that the fleet cannot serve in time go to a fallback provider, within a spend cap."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

from gateway.delivery.fallback_provider import FallbackProvider
from gateway.delivery.relay import Relay
from gateway.delivery.retry_loop import validator_of
from gateway.protocol.body import RequestBody
from gateway.protocol.errors import NO_ROOM, Refused
from gateway.protocol.response_model_name import ModelNameRewrite
from gateway.protocol.usage import event_tokens
from gateway.request_context import RequestContext
from gateway.routing.fleet import ServedModel
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from gateway.telemetry.traces.request_trace import TracedAttempt
from policy.admission.retry_policy import AttemptOutcome
from policy.config.deployment import Deployment
from policy.errors import Refusal
from policy.request import Request
from policy.routing.replica_health import AttemptResult

_RESULTS: Final = {
    AttemptOutcome.SERVED: AttemptResult.GOOD,
    AttemptOutcome.REJECTED: AttemptResult.NOTHING,
    AttemptOutcome.REFUSED: AttemptResult.NOTHING,
    AttemptOutcome.DENIED: AttemptResult.NOTHING,
    AttemptOutcome.LEFT: AttemptResult.NOTHING,
}
# Outcomes after which the provider may have done work and may bill it.
_MAY_BE_BILLED: Final = frozenset(
    {
        AttemptOutcome.SERVED,
        AttemptOutcome.BROKEN,
        AttemptOutcome.LEFT,
        AttemptOutcome.LOST,
        AttemptOutcome.SILENT,
    }
)


class Spillover:
    """The fallback providers of one worker, in the order of the deployment."""

    def __init__(self, metrics: WorkerMetrics, log: StructuredLog, rng: random.Random) -> None:
        self._metrics = metrics
        self._log = log
        self._rng = rng
        self._endpoints: list[FallbackProvider] = []
        self._models: frozenset[str] = frozenset()
        self._backed: frozenset[str] = frozenset()
        self._starts_s: dict[str, float] = {}
        self._clock = asyncio.get_running_loop().time

    def read(self, deployment: Deployment) -> None:
        """Apply the deployment's providers; their spending of this hour stays counted."""
        known = {endpoint.upstream.name: endpoint for endpoint in self._endpoints}
        endpoints = []
        for upstream in deployment.upstreams:
            endpoint = known.pop(upstream.name, None)
            if endpoint is None or endpoint.upstream.url != upstream.url:
                moved = endpoint
                endpoint = FallbackProvider(upstream, deployment, self._log)
                if moved is not None:
                    endpoint.spend_cap = moved.spend_cap
                    moved.pool.close()
            endpoint.read(upstream, deployment)
            endpoints.append(endpoint)
        for gone in known.values():
            gone.pool.close()
        self._endpoints = endpoints
        self._models = frozenset(name for upstream in deployment.upstreams for name in upstream.models)
        self._backed = frozenset(name.partition(":")[0] for name in self._models)
        self._starts_s = {spec.name: spec.control.assumed_start_s for spec in deployment.models}

    def backs(self, request: Request) -> bool:
        """Whether a provider may serve it, or an adapter on its model, instead of the fleet."""
        return request.model in self._backed

    def name_of(self, request: Request, body: RequestBody) -> str:
        """The name (``BASE:NAME`` for adapters) that a provider may list; empty for a pinned version."""
        name = request.model
        if request.adapter:
            if "@" in body.model:
                return ""
            name = f"{name}:{request.adapter.partition('@')[0]}"
        return name if name in self._models else ""

    async def around(
        self,
        fleet: Callable[[], Awaitable[None]],
        call: RequestContext,
        served: ServedModel,
        request: Request,
        *,
        body: RequestBody,
        raw: bytes,
    ) -> None:
        """Serve the call by ``fleet``, or by a provider if no replica can before the request's deadline.

        A provider serves it if admission refuses it for lack of room, or no replica is ready and none is
        expected in time. Raises the fleet's own refusal if no provider serves it either.
        """
        name = self.name_of(request, body)
        if not name:
            await fleet()
            return
        if self._too_late(served, request) and await self._serve(call, request, name, body, raw):
            return
        refusal: Refused | None = None
        try:
            await fleet()
        except Refused as error:
            refusal = error
        if refusal is not None:
            in_time = self._clock() < request.deadline
            wanted = refusal.reason in NO_ROOM and in_time
            if not wanted or not await self._serve(call, request, name, body, raw):
                raise refusal

    def _too_late(self, served: ServedModel, request: Request) -> bool:
        if any(handle.admissible for handle in served.handles):
            return False
        start_s = self._starts_s.get(served.name, 0.0) if served.start_s is None else served.start_s
        return self._clock() + start_s >= request.deadline

    async def _serve(
        self, call: RequestContext, request: Request, name: str, body: RequestBody, raw: bytes
    ) -> bool:
        """Whether a provider that lists ``name`` answered, or began to."""
        before = call.replica
        for endpoint in self._endpoints:
            if not endpoint.serves(call.route, name) or not endpoint.has_key:
                continue
            hold = endpoint.hold(request, call.route, body, self._clock())
            if hold is None:
                self._metrics.spillover.labels(request.model, endpoint.upstream.name, "cost_cap").inc()
                continue
            if not endpoint.open(self._clock()):
                endpoint.spend_cap.settle(hold, 0.0, self._clock())
                continue
            verdict, result = (
                None,
                AttemptResult.NOTHING,
            )  # if the client disconnects; the provider may bill it
            now = monotonic()
            attempt = TracedAttempt(now, now, endpoint.label)
            if call.trace is not None:
                call.trace.begin(attempt)
            try:
                verdict, result = await self._attempt(endpoint, call, name, body, raw)
            finally:
                attempt.end(verdict or AttemptOutcome.LEFT, call.sent_at, call.first_byte_at)
                billed = verdict is None or verdict in _MAY_BE_BILLED
                bill = endpoint.bill(hold, call.usage) if billed else 0.0
                endpoint.spend_cap.settle(hold, bill, self._clock())
                endpoint.note(result, self._clock(), self._rng.random())
                outcome = verdict or "cancelled"
                self._metrics.spillover.labels(request.model, endpoint.upstream.name, outcome).inc()
                self._metrics.spillover_cost.labels(endpoint.upstream.name).inc(bill)
            if verdict is AttemptOutcome.SERVED:
                call.outcome = "ok"
                return True
            if verdict is AttemptOutcome.BROKEN or verdict is AttemptOutcome.LEFT:
                call.outcome = Refusal.STREAM_BROKEN
                return True
        call.replica, call.by_fallback = before, False
        return False

    async def _attempt(
        self, endpoint: FallbackProvider, call: RequestContext, name: str, body: RequestBody, raw: bytes
    ) -> tuple[AttemptOutcome, AttemptResult]:
        """Try one provider; a kept connection that was closed before the request arrived is replaced."""
        call.replica, call.by_fallback = endpoint.label, True
        sent = endpoint.outgoing(call.route, name, body, raw)
        head = endpoint.head(call, sent.size)
        rewrite = ModelNameRewrite(endpoint.upstream.models[name], body.model)
        connection = endpoint.pool.take()
        while True:
            try:
                connection = connection or await endpoint.pool.connect()
            except OSError:
                return AttemptOutcome.UNREACHABLE, AttemptResult.BAD
            validator = validator_of(call.route, body, strip_usage=sent.counts)
            relay = Relay(
                call,
                connection,
                validator,
                self._metrics.model(name.partition(":")[0]),
                rewrite=rewrite,
                tokens=event_tokens(body),
            )
            verdict = await relay.run(head, sent.parts)
            if verdict is not AttemptOutcome.STALE:
                return verdict, _RESULTS.get(verdict, AttemptResult.BAD)
            connection = None
