"""The gateway's composition root and its pipeline: read this file first.

A request: routes -> admission -> routing -> relay -> replica, and its bytes back the same way.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import body as bodies
from gateway.admin import admin_app
from gateway.admission import Admission
from gateway.body import Body
from gateway.call import Call
from gateway.coalescing import Coalescer
from gateway.deadlines import Deadlines
from gateway.delivery import Delivery
from gateway.document import Document
from gateway.errors import Refused
from gateway.fingerprint import adapter_key, limit_of, parts_of, seed_of, session_key
from gateway.fleet import FleetView, Served
from gateway.log import Log
from gateway.metrics import Metrics, ModelMeter
from gateway.outgoing import outgoing
from gateway.overflow import Overflow
from gateway.router import Routes
from gateway.routes import client_app
from gateway.shared import Shared
from gateway.shares import share_of
from gateway.surface import Route
from gateway.tenants import Account, Tenants
from policy.config import Deployment
from policy.errors import Refusal
from policy.request import Request
from policy.types import Runner
from store.keys import own_key


class Gateway:
    """One worker's data plane. ``client`` and ``admin`` are the ASGI apps of its two ports."""

    def __init__(
        self,
        document: Document,
        secret: str,
        salt_secret: bytes,
        *,
        log: Log,
        rng: random.Random,
        shared: Shared,
    ) -> None:
        self.document = document
        self.log = log
        self.draining = False
        self.metrics = Metrics()
        self.deadlines = Deadlines(lambda: document.deployment.gateway)
        self.fleet = FleetView(secret, self.metrics, shared, rng.random)
        self.tenants = Tenants(salt_secret, own_key(secret))
        self.routes = Routes(rng, shared, lambda: document.deployment, self.metrics)
        self.fleet.on_prefixes, self.fleet.on_forget = self.routes.heard, self.routes.forget
        self.admission = Admission(
            self.fleet, self.metrics, self.routes, lambda: document.deployment, weight=self.tenants.weight
        )
        self.coalescer = Coalescer(self._deliver, self.metrics)
        self.overflow = Overflow(self.metrics, log, rng)
        self.client: ASGIApp = client_app(self.serve, self.fleet, self.tenants)
        self.admin: ASGIApp = admin_app(
            self.fleet, self.metrics, self.routes, self.tenants, self.why_not_ready
        )

    def read(self, deployment: Deployment) -> None:
        """Take a new document: who may ask, what is served, and who takes over."""
        self.tenants.read(deployment)
        self.fleet.read_document(deployment)
        self.overflow.read(deployment)

    async def serve(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """The pipeline: one call from its first byte to its last, counted whatever becomes of it."""
        began = monotonic()
        call = Call(route, scope, receive, send, self.deadlines)
        meter = self.metrics.model("")
        limits = self.document.deployment.gateway
        try:
            raw = await call.read()
            account = self.tenants.of(call.headers)
            body = bodies.read(raw)
            call.streaming = body.stream is True
            found = served, _ = self._resolve(route, body.model)
            request = self._request(call, account, body, raw, found)
            if account.admin and call.headers.get(b"x-tidegate-explain") == b"1":
                call.explain = partial(self.routes.explain, request)
            meter = self.metrics.model(served.name)
            meter.in_flight += 1
            account.in_flight += 1
            try:
                alone = partial(self._deliver, call, served, request, body, raw)
                bounds = limits.coalesce
                share = share_of(route, body, raw, account.name, bounds)
                if share is None or call.explain is not None:
                    await alone()
                else:
                    await self.coalescer.serve(share, call, served, request, bounds=bounds, alone=alone)
            finally:
                account.in_flight -= 1
                meter.in_flight -= 1
        except Refused as refused:
            call.outcome = refused.reason
            await call.refuse(refused)
        except asyncio.CancelledError:
            call.outcome = "cancelled"
            if not call.left and not call.started:
                await call.refuse(Refused(Refusal.SHUTTING_DOWN, "The gateway is shutting down."))
        except Exception as error:  # noqa: BLE001 - the edge: a client gets an answer whatever breaks
            call.outcome = Refusal.INTERNAL
            self.log.error("call_failed", route=route.path, error=type(error).__name__)
            if not call.started:
                await call.refuse(Refused(Refusal.INTERNAL, "The gateway failed to serve the request."))
        finally:
            _measure(call, meter, monotonic() - began, began)

    def _request(
        self, call: Call, account: Account, body: Body, raw: bytes, found: tuple[Served, str | None]
    ) -> Request:
        """What the decisions may know of a call."""
        served, adapter = found[0], found[1] or ""
        now = asyncio.get_running_loop().time()
        pools = served.runner is Runner.POOLING
        prompt = self.routes.density(served.name).read(
            0 if pools else seed_of(served.name, adapter, account.name),
            parts_of(body, call.route, raw),
            1 if pools else limit_of(body),
            body.choices,
        )
        session = call.headers.get(b"x-session-id")
        return Request(
            served.name,
            tenant=account.name,
            priority=account.priority,
            adapter=adapter,
            adapter_key=adapter_key(served.name, adapter) if adapter else 0,
            prompt_tokens=prompt.prompt_tokens,
            output_tokens=prompt.output_tokens,
            prefix=prompt.prefix,
            depths=prompt.depths,
            session=session_key(session) if session else 0,
            size=len(raw),
            arrived=now,
            deadline=now + call.timeout_s(self.document.deployment.gateway.queue_timeout_s),
        )

    async def _deliver(self, call: Call, served: Served, request: Request, body: Body, raw: bytes) -> None:
        """One call to a replica, or to an upstream where the fleet cannot serve it in time."""
        meter = self.metrics.model(served.name)
        place = self.admission.arrive(served, request)
        sent = outgoing(call.route, body, raw, self.tenants.salt(request.tenant))
        delivery = Delivery(self.admission, place, call, meter, body=body, outgoing=sent)
        try:
            await self.overflow.around(delivery.run, call, served, request, body=body, raw=raw)
        finally:
            if (usage := call.usage) is not None:
                self.tenants.served(request.tenant, usage)
                if usage.exact:  # else what was estimated stands
                    self.admission.settle(place, usage.prompt, usage.completion)

    def count_refused(self, refused: Refused) -> None:
        """Count a request that was refused before it could be read."""
        self.metrics.model("").requests["", refused.reason] += 1

    def why_not_ready(self) -> list[str]:
        """What keeps this worker from serving; empty when it is ready."""
        reasons = []
        if self.draining:
            reasons.append("draining")
        if not self.fleet.models:
            reasons.append("no model is known")
        if self.document.deployment.needs_controller and self.fleet.source == "none":
            reasons.append("the controller was not seen yet and no last fleet is on disk")
        return reasons

    def _resolve(self, route: Route, name: str) -> tuple[Served, str | None]:
        """The model (and adapter) that a call names; raises :class:`gateway.errors.Refused`."""
        found = self.fleet.find(name)
        if found is None:
            raise Refused(Refusal.UNKNOWN_MODEL, f"The model '{name[:128]}' does not exist.", param="model")
        served = found[0]
        if route.runner is not None and served.runner is not route.runner:
            raise Refused(
                Refusal.UNSUPPORTED,
                f"{route.path} needs a model with runner '{route.runner}'; "
                f"{served.name} has runner '{served.runner}'.",
                param="model",
            )
        return found


def _measure(call: Call, meter: ModelMeter, took_s: float, began: float) -> None:
    meter.requests[(call.route.path, call.outcome)] += 1
    if meter.model:
        meter.queue_wait.add(call.queued_s)
    first_at = call.first_byte_at
    if first_at is not None:
        meter.ttft.add(first_at - began)
    if call.outcome == "ok":
        meter.e2e.add(took_s)
        if first_at is not None:
            gap_s = (call.last_event_at - first_at) / (call.events - 1) if call.events > 1 else 0.0
            meter.served_stream(first_at - began, gap_s)
