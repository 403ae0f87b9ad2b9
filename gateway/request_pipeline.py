"""The gateway's composition root and its pipeline: read this file first.

routes -> intake -> admission -> batching -> routing -> relay -> replica, and its bytes back that way.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.accounting_proxy import AccountingProxy
from gateway.api.application import admin_app, client_app
from gateway.api.controller_proxy import ControllerProxy
from gateway.api.dependencies import Services
from gateway.api.models_response import ModelsResponse
from gateway.control.deployment_file_watcher import DeploymentWatcher
from gateway.delivery.crash_suspects import HostCrashSuspects
from gateway.delivery.replica_idle_timeouts import IdleTimeouts
from gateway.delivery.retry_loop import RetryLoop
from gateway.delivery.spillover import Spillover
from gateway.delivery.sse_keepalive import SseKeepalive
from gateway.http.forwarded import TrustedProxies
from gateway.intake.adapter_catalog import CatalogView
from gateway.intake.admin_keys import AdminKeys
from gateway.intake.authentication import TenantDirectory
from gateway.intake.key_restrictions import bound_answer, check_features
from gateway.intake.principal import Principal, WorkerTenant
from gateway.intake.rate_limiter import RateLimiter
from gateway.intake.request_resolver import RequestResolver
from gateway.intake.shared_limits import SharedLimits
from gateway.intake.usage_journal import UsageJournal
from gateway.protocol import body as bodies
from gateway.protocol.body import AcceptedBody, BodyRules, RequestBody
from gateway.protocol.body_batching import COALESCED
from gateway.protocol.errors import Refused
from gateway.protocol.json_structure import JsonPieceReader
from gateway.protocol.paths import ROUTES, ProxyRoute
from gateway.protocol.usage import UsageBounds
from gateway.queue.admission import Admission
from gateway.queue.dynamic_batching import DynamicBatcher
from gateway.request_context import HEADERS, RequestContext, headers_of
from gateway.routing.engine_cache.external_server_caches import ServerCaches
from gateway.routing.fleet import FleetView, ServedModel
from gateway.routing.fleet_listeners import FleetListeners
from gateway.routing.model_routers import ModelRouters
from gateway.routing.shared_counters import SharedCounts
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.metrics import ModelCounters, WorkerMetrics
from gateway.telemetry.scrape import Scraper
from gateway.telemetry.structured_log import StructuredLog
from gateway.telemetry.tenant_metrics import NONE
from gateway.telemetry.traces.exporter import TraceExporter
from gateway.telemetry.workload_capture_publisher import CapturePublisher
from gateway.telemetry.workload_capture_subscriber import CaptureSubscribers
from policy.config.deployment import Deployment
from policy.config.media_hosts import allowed_hosts
from policy.errors import Refusal
from policy.request import Request
from policy.tenancy.token_count import most_tokens
from policy.types import Runner
from policy.wire.headers import CANARY_HEADER, EXPLAIN_HEADER
from store.key_derivation import own_key

# Machine code reads constants faster than names of other modules and members of enumerations.
monotonic: Final = time.monotonic
_GENERATE: Final = Runner.GENERATE

# The keys of the scope for what the head tells: who the client is, and why the request is refused.
_PRINCIPAL: Final = "tidegate.principal"
_REFUSED: Final = "tidegate.refused"
_CANARY: Final = CANARY_HEADER.encode()
_EXPLAIN: Final = EXPLAIN_HEADER.encode()


class Gateway:
    """One worker's data plane. ``client`` and ``admin`` are the ASGI apps of its two ports.

    ``draining`` is set when the worker accepts no more requests.
    """

    def __init__(
        self,
        watcher: DeploymentWatcher,
        secret: str,
        salt_secret: bytes,
        *,
        admin_token: Callable[[], str],
        log: StructuredLog,
        access: AccessLog,
        traces: TraceExporter,
        rng: random.Random,
        shared: SharedCounts,
        captures: Path,
        accounting: Path,
        journal: UsageJournal,
        limits: SharedLimits,
    ) -> None:
        def current() -> Deployment:
            return watcher.deployment

        self._deployment = current
        self.draining = False
        self.log = log
        self.access = access
        self.traces = traces
        self.tracer = traces.tracer
        self.metrics = WorkerMetrics()
        self._limits = watcher.deployment.gateway
        self._rules = BodyRules()
        self.deadlines = IdleTimeouts(lambda: watcher.deployment.gateway)
        self.keepalive = SseKeepalive(lambda: watcher.deployment.gateway)
        self.catalog = CatalogView(partial(rng.getrandbits, 64), self.metrics.adapters.follow)
        self.tenants = TenantDirectory(salt_secret, own_key(secret), self.metrics.tenants, shared)
        self.journal = journal
        self.admin_keys = AdminKeys()
        self.limiter = RateLimiter(limits)
        self.suspects = HostCrashSuspects(shared)
        self.routes = ModelRouters(rng, shared, current, self.metrics, self.suspects.lost_elsewhere)
        self.admission = Admission(
            self.metrics, self.routes, current, weight=self.tenants.weight, shared=shared
        )
        events = FleetListeners(
            changed=self.admission.replica_changed,
            unavailable=self.admission.dismiss,
            prefixes=self.routes.learn_prefixes,
            cached=self.routes.learn_cached,
            forgotten=self.routes.forget,
            adapters=self.routes.set_adapters,
            unloadable=self.admission.give_up,
            died=lambda model, replica: self.suspects.died(model, replica, monotonic()),
        )
        caches = ServerCaches(events.cached, events.forgotten, log)
        self.fleet = FleetView(secret, self.metrics, shared, rng.random, events, caches=caches)
        self.intake = RequestResolver(self.fleet, self.catalog, self.routes)
        self._pieces = JsonPieceReader()
        self.coalescer = DynamicBatcher(self._deliver, self.metrics, log, self._pieces)
        self.spillover = Spillover(self.metrics, log, rng)
        self.capture = CapturePublisher(captures)
        self.listeners = CaptureSubscribers(captures, lambda name: self.routes.densities[name].bytes_a_token)
        self.proxies = TrustedProxies()
        self.scraper = Scraper(self.metrics, secret, current, self.fleet.scraped)
        services = Services(
            fleet=self.fleet,
            models=ModelsResponse(self.fleet, self.catalog),
            tenants=self.tenants,
            scraper=self.scraper,
            routers=self.routes,
            not_ready=self.not_ready,
            controller=ControllerProxy(secret, current),
            accounting=AccountingProxy(accounting),
            admin_keys=self.admin_keys,
            capture=self.listeners.lines,
            chat=self.chat_of_operator,
            limits=lambda: self.limiter.in_use(self.tenants.principals()),
            log=log,
            access=access,
        )
        self.client = client_app(services, self.serve)
        self.admin: ASGIApp = admin_app(services, admin_token, lambda: current().gateway)

    def read(self, deployment: Deployment) -> None:
        """Apply a new deployment: tenants, models, adapters, fallback providers."""
        self._limits = deployment.gateway
        self._rules = BodyRules(allowed_hosts(deployment), frozenset(deployment.gateway.extra_fields))
        self.access.on = deployment.gateway.access_log
        self.proxies.read(deployment.gateway.trusted_proxies)
        self.tracer.read(deployment.tracing)
        self.client.allow_origins(deployment.gateway.cors)
        self.tenants.read(deployment)
        self.journal.read(deployment)
        self.fleet.read_document(deployment)
        self.catalog.read(deployment)
        self.spillover.read(deployment)
        for spec in deployment.models:
            self.metrics.model(spec.name).totals.set_slo(spec.control)

    def not_ready(self) -> list[str]:
        """The reasons why this worker should not be sent requests; empty when it is ready."""
        reasons = []
        if self.draining:
            reasons.append("draining")
        if not self.fleet.models:
            reasons.append("no model is known")
        if self._deployment().needs_controller and self.fleet.source == "none":
            reasons.append("the controller was not seen yet and no last fleet is on disk")
        elif self.catalog.wanted and not self.catalog.known:
            reasons.append("the controller has not sent the adapter catalog yet")
        return reasons

    def end_captures(self) -> None:
        """Send capture subscribers the rows that are left, and close their streams."""
        self.capture.close()
        self.listeners.close()

    def measure(self) -> Iterator[None]:
        """Take what is counted only when the metrics are published, soon after: some with each step."""
        yield from self.tenants.share()
        self.fleet.measure_round_trips()
        self.fleet.count_up()
        self.metrics.count_unrecorded(self.journal.unrecorded)

    async def close(self) -> None:
        async with AsyncExitStack() as parts:  # they close in reverse, and one that fails skips no other
            parts.callback(self.limiter.close)
            parts.callback(self.journal.close)
            for close in (self.traces.close, self.access.close, self.scraper.close):
                parts.push_async_callback(close)
            self.fleet.close()
            list(self.measure())
            self.metrics.publish()

    def body_limit(self, scope: Scope) -> int:
        """How large the body of a request may be: 0 unless its route, coding and key are accepted."""
        if scope["path"] not in ROUTES or scope["method"] != "POST":
            return 0
        headers = scope[HEADERS] = headers_of(scope)
        try:
            scope[_PRINCIPAL] = self.tenants.of(headers)
            _refuse_compressed(headers)
            scope[_REFUSED] = None
        except Refused as refused:
            scope[_REFUSED] = refused
            return 0
        return self._limits.max_body_bytes

    def _principal(self, scope: Scope) -> Principal:
        principal: Principal = scope.get(_PRINCIPAL, self.tenants.anonymous)
        return principal

    def upload_limits(self) -> tuple[int, int]:
        """How many bytes of unfinished requests are held, of all clients and of one address."""
        limits, least = self._limits, 2 * self._limits.max_body_bytes
        return max(limits.max_upload_bytes, least), max(limits.max_upload_bytes_per_address, least)

    async def serve(self, route: ProxyRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """The pipeline: one call from its first byte to its last, counted in any case."""
        began = monotonic()
        call = RequestContext(route, scope, receive, send, self.deadlines, pieces=self._pieces)
        call.trace = self.tracer.begin(call.headers) if self.tracer.on else None
        meter, principal = self.metrics.no_model, self._principal(scope)
        account = principal.account
        try:
            raw = await call.read()
            if (refusal := scope[_REFUSED]) is not None:
                raise refusal
            accepted = (
                bodies.accept(raw, route, self._rules)
                if len(raw) <= bodies.MAX_DECODED
                else await bodies.accept_large(raw, route, self._rules, self._pieces)
            )
            body, raw = _allowed(call, principal, accepted)
            call.streaming = body.stream is True
            served, request = self.intake.take(
                call, principal, body, raw, patience_s=self._limits.queue_timeout_s
            )
            if account.admin and call.headers.get(_EXPLAIN) == b"1":
                call.explain = partial(self.routes.explain, request)
            elif call.streaming and route.runner is _GENERATE and call.proxied is None:
                self.keepalive.watch(call, began)
            meter = self.metrics.model(served.name)
            self._arrive(call, meter, principal, served, request, body)
            account.in_flight += 1
            try:
                alone = call.probe or call.explain is not None or call.proxied is not None
                if route.path not in COALESCED or alone:
                    await self._deliver(call, served, request, body, raw)
                else:
                    bounds = self._limits.coalesce
                    await self.coalescer.around(call, served, request, body, raw, bounds=bounds)
            finally:
                account.in_flight -= 1
                meter.in_flight -= 1
                if self.capture.has_subscribers:
                    self.capture.ended(call, request, body, raw, began)
        except Refused as refused:
            call.outcome = refused.reason
            await call.refuse(refused)
        except asyncio.CancelledError:
            call.outcome = "cancelled"
            if not call.disconnected and call.waits:
                await call.refuse(Refused(Refusal.SHUTTING_DOWN, "The gateway is shutting down."))
        except Exception as error:  # noqa: BLE001 - the edge: a client gets an answer whatever breaks
            call.outcome = Refusal.INTERNAL
            self.log.error("call_failed", cause=error, route=route.path, request_id=call.request_id.decode())
            if call.waits:
                await call.refuse(Refused(Refusal.INTERNAL, "The gateway failed to serve the request."))
        finally:
            self._end(call, meter, account, began)

    async def chat_of_operator(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A chat completion from the admin port, which has checked the token: of any model or adapter."""
        path = "/v1/chat/completions"
        scope = {**scope, "path": path, _PRINCIPAL: self.tenants.operator, _REFUSED: None}
        await self.serve(ROUTES[path], scope, receive, send)

    def _arrive(  # noqa: PLR0917 - what is known of a call, in one place
        self, call: RequestContext, meter: ModelCounters, principal: Principal, served: ServedModel,
        request: Request, body: RequestBody,
    ) -> None:  # fmt: skip
        """Count a call whose model is known, and prepare what its tenant is charged for it.

        Raises :class:`gateway.protocol.errors.Refused` if its tenant or key is over a limit.
        """
        call.priority = request.priority
        if (proxied := call.proxied) is not None:
            urls = {handle.replica.id: handle.replica.url for handle in served.handles}
            request.only = proxied.allowed(urls)
        call.probe = call.headers.get(_CANARY) == b"1" and self.tenants.is_own(call.headers)
        if call.route.runner is not None and not call.probe:
            adapter = request.adapter if call.adapter is None else call.adapter.name
            call.charge = self.journal.charge(request, principal.account.name, principal.key_id, adapter)
        if principal.limited:
            tokens = nano = 0
            if (charge := call.charge) is not None:
                prompt = tokens = request.prompt_tokens
                if call.route.runner is _GENERATE:
                    context = served.max_model_len
                    tokens = most_tokens(prompt, request.limit_tokens, context, body.choices)
                nano = charge.rates.cost(prompt, 0, tokens - prompt)
            call.reservation = self.limiter.admit(principal, tokens, nano)
            if charge is not None:
                charge.reservation = call.reservation
        meter.arrive(request.prompt_tokens, probe=call.probe)

    def _end(self, call: RequestContext, meter: ModelCounters, account: WorkerTenant, began: float) -> None:
        """Count a call that has ended, and log and trace it if requests are."""
        ended = monotonic()
        if (reservation := call.reservation) is not None:
            # Nothing of an answer was relayed, or it is settled. Who leaves before may have cost a prefill.
            charge, sent = call.charge, call.sent_at > 0.0
            left = charge is not None and sent and call.outcome == "cancelled"
            reservation.settle(charge.prompt if charge is not None and left else 0, 0, began=sent)
        if call.streaming:
            self.keepalive.forget(call)
        if call.trace is not None:
            self.tracer.end(call, meter.model, account.name, began, ended)
        meter.count(call, began, ended)
        account.counters.requests[call.outcome] += 1
        account.counters.queued_s += call.queued_s
        if (adapter := call.adapter) is not None:
            self.metrics.adapters.of(adapter.model, adapter.name).count(call, began)
        if self.access.on:
            self.access.call(call, meter.model, account.name, ended - began)

    async def _deliver(
        self, call: RequestContext, served: ServedModel, request: Request, body: RequestBody, raw: bytes
    ) -> None:
        """One call to a replica, or to a fallback provider where the fleet cannot serve it in time."""
        ticket = self.admission.ticket(served, request)
        meter = self.metrics.model(served.name)
        salt = self.tenants.salt(request.tenant)
        delivery = RetryLoop(ticket, call, meter, self.suspects, body=body, raw=raw, salt=salt)
        call.usage_bounds = UsageBounds(request, body, raw, served.max_model_len)
        try:
            if call.proxied is None and self.spillover.backs(request):
                await self.spillover.around(delivery.run, call, served, request, body=body, raw=raw)
            else:
                await delivery.run()
        finally:
            if (usage := call.usage) is not None:
                self.tenants.served(request.tenant, usage)
                if (adapter := call.adapter) is not None:
                    self.metrics.adapters.of(adapter.model, adapter.name).tokens.count(usage)

    def count_refused(self, refused: Refused, scope: Scope | None, request_id: bytes) -> None:
        """Count a request that was rejected before it was read; ``scope`` if its head was."""
        account = self._principal(scope or {}).account
        self.metrics.no_model.requests[NONE, refused.reason] += 1
        account.counters.requests[refused.reason] += 1
        if self.access.on:
            client, status, outcome = (scope or {}).get("client"), refused.status, refused.reason
            self.access.unread(request_id, client=client, tenant=account.name, status=status, outcome=outcome)


def _allowed(call: RequestContext, principal: Principal, accepted: AcceptedBody) -> tuple[RequestBody, bytes]:
    """The body of a call that may be made of it, with the longest answer that the caller may have."""
    call.accepted()
    call.dropped = accepted.dropped
    if principal.features is not None:
        check_features(call.route, accepted.body, principal.features)
    if principal.max_tokens is not None:
        bound_answer(call.route, accepted.body, principal.max_tokens)
    return accepted.body, accepted.raw


def _refuse_compressed(headers: dict[bytes, bytes]) -> None:
    """Refuse a body that is compressed: no OpenAI or Anthropic client does so, and no engine reads it."""
    content, transfer = headers.get(b"content-encoding"), headers.get(b"transfer-encoding")
    if (content and content.lower() != b"identity") or (
        transfer is not None and transfer.lower() != b"chunked"
    ):
        raise Refused(Refusal.ENCODED, "Compressed bodies are not accepted: send the body as it is.")
