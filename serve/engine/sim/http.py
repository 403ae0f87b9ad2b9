"""HTTP parts of the simulated engine's endpoints: bodies, errors, events and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from policy.errors import EngineFailed
from serve.engine.interface import Receive, Scope, Send
from serve.engine.sim.step_loop import Aborted, Generation

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_NAMES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


class ApiError(Exception):
    """An answer other than 200, in vLLM's envelope: ``code`` is the status as an integer."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        name = _NAMES.get(self.status, "Error")
        return {"error": {"message": self.message, "type": name, "param": self.param, "code": self.status}}


def answer(body: object, status: int = 200) -> Response:
    """``body`` as JSON."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


async def on_api_error(_: Request, error: Exception) -> Response:
    """Starlette's handler of :class:`ApiError`."""
    assert isinstance(error, ApiError)
    return answer(error.body, error.status)


async def on_engine_failed(_: Request, error: Exception) -> Response:
    """Starlette's handler of :class:`policy.errors.EngineFailed`."""
    return answer(ApiError(500, str(error)).body, 500)


async def on_http_exception(_: Request, error: Exception) -> Response:
    """Starlette's handler of its own 404 and 405."""
    assert isinstance(error, HTTPException)
    return answer(ApiError(error.status_code, error.detail).body, error.status_code)


async def read(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded body; raises a 400 that names the invalid field."""
    raw = await request.body()
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        raise ApiError(400, what, path.strip(".`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def event(body: object, name: str = "") -> bytes:
    """One server-sent event; ``name`` adds its event line."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(body))


@contextlib.asynccontextmanager
async def attended(receive: Receive, leave: Callable[[], None]) -> AsyncIterator[None]:
    """Call ``leave`` when the client disconnects while the block runs, and when the block ends."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        leave()


async def whole(request: Request, generation: Generation, leave: Callable[[], None]) -> None:
    """Wait for all of ``generation``; ``leave`` aborts it. Raises EngineFailed, and a 499 once aborted."""
    async with attended(request.receive, leave):
        try:
            await generation.finish()
        except Aborted:
            raise ApiError(499, "the client closed the request") from None


class EventStream(Response):
    """Server-sent events as they are made; ``leave`` aborts what makes them."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._events = events
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with attended(receive, self._leave):
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Aborted:
                return
            except EngineFailed as error:
                # As vLLM: an error event, then [DONE].
                data = event(ApiError(500, str(error)).body) + DONE
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
