"""The gateway's composition root and its pipeline: read this file first.

A request: routes -> admission -> routing -> relay -> replica, and its bytes back the same way.
"""

from __future__ import annotations

import asyncio
import random
from time import monotonic

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import body as bodies
from gateway.admin import admin_app
from gateway.admission import Admission
from gateway.call import Call
from gateway.deadlines import Deadlines
from gateway.delivery import Delivery
from gateway.document import Document
from gateway.errors import Refused
from gateway.fleet import FleetView, Served
from gateway.log import Log
from gateway.metrics import Metrics, ModelMeter
from gateway.router import Routes
from gateway.routes import client_app
from gateway.shared import Shared
from gateway.surface import Route
from policy.errors import Refusal
from policy.request import Request


class Gateway:
    """One worker's data plane. ``client`` and ``admin`` are the ASGI apps of its two ports."""

    def __init__(self, document: Document, secret: str, log: Log, rng: random.Random, shared: Shared) -> None:
        self.document = document
        self.log = log
        self.draining = False
        self.metrics = Metrics()
        self.deadlines = Deadlines(lambda: document.deployment.gateway)
        self.fleet = FleetView(secret, self.metrics, shared, rng.random)
        self.admission = Admission(self.fleet, self.metrics, Routes(rng), lambda: document.deployment)
        self.client: ASGIApp = client_app(self.serve, self.fleet)
        self.admin: ASGIApp = admin_app(self.fleet, self.metrics, self.why_not_ready)

    async def serve(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        """The pipeline: one call from its first byte to its last, counted whatever becomes of it."""
        began = monotonic()
        call = Call(route, scope, receive, send, self.deadlines)
        meter = self.metrics.model("")
        limits = self.document.deployment.gateway
        try:
            raw = await call.read()
            body = bodies.read(raw)
            call.streaming = body.stream is True
            served, adapter = self._resolve(route, body.model)
            now = asyncio.get_running_loop().time()
            request = Request(
                served.name,
                adapter=adapter or "",
                size=len(raw),
                arrived=now,
                deadline=now + call.timeout_s(limits.queue_timeout_s),
            )
            meter = self.metrics.model(served.name)
            meter.in_flight += 1
            try:
                place = self.admission.arrive(served, request)
                await Delivery(self.admission, place, call, meter, body=body, raw=raw).run()
            finally:
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
