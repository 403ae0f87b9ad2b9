"""The controller's internal HTTP API, behind the secret."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from policy.errors import ConfigError, TidegateError
from policy.types import Replica
from serve.control import Controller
from store.state import SECRET_HEADER

HEARTBEAT_S = 1.0
# A burst of changes is one snapshot.
COALESCE_S = 0.05


class ScaleRequest(msgspec.Struct, frozen=True):
    model: str
    replicas: int


class ModeRequest(msgspec.Struct, frozen=True):
    model: str
    mode: str


class _Secret:
    """Lets nothing in without the internal secret."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self._app = app
        self._secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(SECRET_HEADER.encode(), b"")
            if not hmac.compare_digest(given, self._secret):
                answer = _error(401, "Unauthorized", "the internal secret is missing or wrong")
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def build_app(controller: Controller, secret: str) -> Starlette:
    """The app over one controller."""

    async def livez(request: Request) -> Response:
        return _json({"ok": True})

    async def fleet(request: Request) -> Response:
        return _json(controller.fleet())

    async def stream(request: Request) -> Response:
        return StreamingResponse(_snapshots(controller), media_type="application/x-ndjson")

    async def status(request: Request) -> Response:
        return _json(controller.status())

    async def beat(request: Request) -> Response:
        controller.beat(msgspec.json.decode(await request.body(), type=Replica))
        return _json({"ok": True})

    async def scale(request: Request) -> Response:
        wanted = msgspec.json.decode(await request.body(), type=ScaleRequest)
        return _json(controller.scale(wanted.model, wanted.replicas))

    async def mode(request: Request) -> Response:
        wanted = msgspec.json.decode(await request.body(), type=ModeRequest)
        return _json(controller.mode(wanted.model, wanted.mode))

    async def apply(request: Request) -> Response:
        return _json(controller.apply(msgspec.json.decode(await request.body(), type=dict[str, object])))

    return Starlette(
        routes=[
            Route("/livez", livez),
            Route("/fleet", fleet),
            Route("/fleet/stream", stream),
            Route("/status", status),
            Route("/replicas", _refusing(beat), methods=["POST"]),
            Route("/scale", _refusing(scale), methods=["POST"]),
            Route("/mode", _refusing(mode), methods=["POST"]),
            Route("/apply", _refusing(apply), methods=["POST"]),
        ],
        middleware=[Middleware(_Secret, secret=secret)],
    )


async def _snapshots(controller: Controller) -> AsyncIterator[bytes]:
    await controller.heard()
    while True:
        fleet = controller.fleet()
        yield msgspec.json.encode(fleet) + b"\n"
        await asyncio.sleep(COALESCE_S)
        await controller.registry.wait(fleet.version, HEARTBEAT_S - COALESCE_S)


Handler = Callable[[Request], Awaitable[Response]]


def _refusing(handler: Handler) -> Handler:
    """Answer refusals as 409 and undecodable bodies as 400, with what the caller can act on."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except TidegateError as error:
            return _error(409, type(error).__name__, str(error), error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # msgspec raises the second for text that is not UTF-8.
            return _error(400, "BadRequest", str(error))

    return wrapped


def _error(status: int, kind: str, message: str, error: TidegateError | None = None) -> Response:
    body: dict[str, object] = {"type": kind, "message": message}
    if isinstance(error, ConfigError):
        body |= {"path": error.path, "value": error.value, "expected": error.expected}
    return _json({"error": body}, status)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
