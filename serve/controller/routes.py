"""The controller's internal HTTP API, behind the secret."""

from __future__ import annotations

import hmac
import math
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from policy.config.control import Seconds
from policy.wire.controller import (
    DECISIONS,
    DOCUMENT,
    FLEET,
    FLEET_STREAM,
    GPUS,
    HISTORY,
    LIVE,
    METRICS,
    MODE,
    REPLICAS,
    SCALE,
    SIGNALS,
    STATUS,
    STEPS,
)
from policy.wire.controller_reports import GatewayReport
from policy.wire.headers import SECRET_HEADER
from policy.wire.heartbeat import Heartbeat
from serve.adapters import api
from serve.async_waiting import run_in_thread
from serve.autoscaler.decision_history import DAY_S
from serve.controller.controller import Controller
from serve.controller_api_schema import ModelStatus
from serve.json_responses import Handler, error_answer, json_answer, refusing

MAX_DECISIONS = 1000

OK = {"ok": True}
Auto = Literal["auto"]
T = TypeVar("T")


class ScaleRequest(msgspec.Struct, frozen=True):
    """Override a replica count for ``for_s`` seconds or until cleared; ``auto`` clears it."""

    model: str
    replicas: int | Auto
    for_s: Seconds | None = None


class ModeRequest(msgspec.Struct, frozen=True):
    """Override a mode for ``for_s`` seconds or until cleared; ``auto`` clears it."""

    model: str
    mode: str
    for_s: Seconds | None = None


class DecisionsQuery(msgspec.Struct, frozen=True):
    """The ``last`` decisions, of one ``model``, up to the instant ``at``."""

    last: Annotated[int, Meta(ge=1, le=MAX_DECISIONS)] = 1
    at: float | None = None
    model: str | None = None


class HistoryQuery(msgspec.Struct, frozen=True):
    """The history of one ``model`` or of all, between two instants, in rows of ``step_s`` seconds."""

    model: str | None = None
    since: float | None = None
    until: float | None = None
    step_s: Annotated[float, Meta(ge=0, le=DAY_S)] = 0.0


class StepsQuery(msgspec.Struct, frozen=True):
    """The ``model`` whose engines to listen to."""

    model: str


class SecretProtectedApp:
    """An app behind the internal secret."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
            if not hmac.compare_digest(given, self._secret):
                answer = error_answer(401, "Unauthorized", "the internal secret is missing or wrong")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def build_app(controller: Controller, secret: str) -> Starlette:
    """The app over one controller."""

    async def stream(request: Request) -> Response:
        return StreamingResponse(snapshots(controller), media_type="application/x-ndjson")

    async def steps(request: Request) -> Response:
        asked = msgspec.convert(dict(request.query_params), StepsQuery)
        return StreamingResponse(_lines(controller.steps(asked.model)), media_type="application/x-ndjson")

    async def scale(request: Request) -> Response:
        wanted = msgspec.json.decode(await request.body(), type=ScaleRequest)
        count = None if wanted.replicas == "auto" else wanted.replicas
        before = controller.overridden(wanted.model)
        status = controller.scale(wanted.model, count, wanted.for_s)
        return await changed(request, "scale", before, status)

    async def mode(request: Request) -> Response:
        wanted = msgspec.json.decode(await request.body(), type=ModeRequest)
        before = controller.overridden(wanted.model)
        status = controller.mode(wanted.model, None if wanted.mode == "auto" else wanted.mode, wanted.for_s)
        return await changed(request, "mode", before, status)

    async def changed(request: Request, action: str, before: object, status: ModelStatus) -> Response:
        after = controller.overridden(status.name)
        await controller.audit.record(request.headers, action, status.name, before=before, after=after)
        return json_answer(status)

    async def apply(request: Request) -> Response:
        document = msgspec.json.decode(await request.body(), type=dict[str, object])
        policies = await run_in_thread(lambda: controller.prepare(document), "apply")
        await controller.check_placeable(document)
        return json_answer(controller.apply(document, policies))

    async def metrics(request: Request) -> Response:
        return json_answer(await controller.metrics.collect())

    async def decisions(request: Request) -> Response:
        asked = msgspec.convert(dict(request.query_params), DecisionsQuery, strict=False)
        journal = controller.autoscaler.journal
        found = await run_in_thread(
            lambda: _json_list(journal.read(asked.last, asked.at, asked.model)), "journal-read"
        )
        return Response(found, media_type="application/json")

    async def history(request: Request) -> Response:
        asked = msgspec.convert(dict(request.query_params), HistoryQuery, strict=False)
        kept = controller.autoscaler.history
        since = controller.autoscaler.at - DAY_S if asked.since is None else asked.since
        until = math.inf if asked.until is None else asked.until
        names = kept.names() if asked.model is None else [asked.model]
        found = await run_in_thread(
            lambda: _json_list(kept.read(name, since, until, asked.step_s) for name in names), "history-read"
        )
        return Response(found, media_type="application/json")

    def restored(path: str, handler: Handler) -> Route:
        """A change, for which the controller must know its models."""

        async def endpoint(request: Request) -> Response:
            await controller.wait_until_restored()
            return await handler(request)

        return Route(path, refusing(endpoint), methods=["POST"])

    return Starlette(
        routes=[
            _get("/livez", lambda: OK),
            _get(FLEET, controller.fleet),
            _get(STATUS, controller.status),
            _get(DOCUMENT, controller.document),
            _get(GPUS, controller.gpus),
            Route(FLEET_STREAM, stream),
            Route(DECISIONS, refusing(decisions)),
            Route(HISTORY, refusing(history)),
            _get(LIVE, controller.live),
            Route(METRICS, metrics),
            Route(STEPS, refusing(steps)),
            _post(REPLICAS, Heartbeat, controller.beat),
            _post(SIGNALS, GatewayReport, controller.signals),
            restored(SCALE, scale),
            restored(MODE, mode),
            restored("/apply", apply),
            *api.routes(controller.adapters, controller.audit),
        ],
        middleware=[Middleware(SecretProtectedApp, secret=secret)],
    )


def _get(path: str, answer: Callable[[], object]) -> Route:
    async def endpoint(request: Request) -> Response:
        return json_answer(answer())

    return Route(path, endpoint)


def _post(path: str, kind: type[T], answer: Callable[[T], object]) -> Route:
    return Route(path, refusing(_decoded(kind, answer)), methods=["POST"])


def _decoded(kind: type[T], answer: Callable[[T], object]) -> Handler:
    async def endpoint(request: Request) -> Response:
        return json_answer(answer(msgspec.json.decode(await request.body(), type=kind)))

    return endpoint


def _json_list(values: Iterable[object]) -> bytes:
    """A JSON list, encoded piece by piece so that other threads can run."""
    return b"[" + b",".join(msgspec.json.encode(value) for value in values) + b"]"


async def _lines(values: AsyncIterator[object]) -> AsyncIterator[bytes]:
    """The values as NDJSON."""
    async for value in values:
        yield msgspec.json.encode(value) + b"\n"


def snapshots(controller: Controller) -> AsyncIterator[bytes]:
    """The fleet as NDJSON; none before running replicas had the time to report."""

    async def line() -> tuple[int, bytes]:
        await controller.wait_for_reports()
        fleet = controller.fleet()
        return fleet.version, msgspec.json.encode(fleet) + b"\n"

    return controller.registry.revision.stream(line)
