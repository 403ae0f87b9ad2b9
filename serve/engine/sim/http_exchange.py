"""HTTP parts of the simulated engine's endpoints: bodies, errors, events and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import msgspec
from msgspec import inspect
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from policy.errors import EngineFailed
from serve.engine.interface import Receive, Scope, Send
from serve.engine.sim.step_loop import Generation, RequestAborted

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
# Pydantic's words for booleans; msgspec knows the others.
_WORDS = {"yes": True, "y": True, "on": True, "t": True, "no": False, "n": False, "off": False, "f": False}
_NAMES = {400: "BadRequestError", 404: "NotFoundError", 500: "InternalServerError"}


class ApiError(HTTPException):
    """An answer other than 200; ``param`` is the invalid field of the body."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param


def _error_body(status: int, message: str, param: str | None = None) -> object:
    """vLLM's envelope of an error: ``code`` is the status as an integer."""
    name = _NAMES.get(status, "Error")
    return {"error": {"message": message, "type": name, "param": param, "code": status}}


def answer(body: object, status: int = 200) -> Response:
    """``body`` as JSON."""
    return Response(msgspec.json.encode(body), status_code=status, media_type="application/json")


async def on_error(_: Request, error: Exception) -> Response:
    """Starlette's handler of :class:`ApiError`, its own 404 and 405, and EngineFailed."""
    if not isinstance(error, HTTPException):
        return answer(_error_body(500, str(error)), 500)
    param = error.param if isinstance(error, ApiError) else None
    return answer(_error_body(error.status_code, error.detail, param), error.status_code)


async def read(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The decoded body; raises a 400 that names the invalid field."""
    raw = await request.body()
    try:
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError:
            if (relaxed := _relaxed(raw, decoder.type)) is None:
                raise
            return msgspec.convert(relaxed, decoder.type, strict=False)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        raise ApiError(400, what, path.strip(".`") or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


def _relaxed(raw: bytes, kind: type) -> dict[str, object] | None:
    """A body whose fields vLLM's models take for their types: words for booleans, booleans for numbers."""
    body = msgspec.json.decode(raw)
    if not isinstance(body, dict):
        return None
    changed = False
    for field in msgspec.structs.fields(kind):
        value = body.get(field.encode_name)
        if not isinstance(value, bool | str):
            continue
        info = inspect.type_info(field.type)
        kinds = {type(each) for each in (info.types if isinstance(info, inspect.UnionType) else (info,))}
        if isinstance(value, bool) and inspect.BoolType not in kinds:
            if kinds & {inspect.IntType, inspect.FloatType}:
                body[field.encode_name], changed = int(value), True
        elif isinstance(value, str) and inspect.BoolType in kinds and value.lower() in _WORDS:
            body[field.encode_name], changed = _WORDS[value.lower()], True
    return body if changed else None


def event(body: object, name: str = "") -> bytes:
    """One server-sent event; ``name`` adds its event line."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, msgspec.json.encode(body))


@contextlib.asynccontextmanager
async def _aborting(generation: Generation, receive: Receive) -> AsyncIterator[None]:
    """Abort ``generation`` when the client disconnects while the block runs, and when the block ends."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        generation.abort()


async def respond(
    request: Request,
    generation: Generation,
    whole: Callable[[], object],
    events: AsyncIterator[bytes] | None = None,
) -> Response:
    """The stream of ``events``; without them the body ``whole()`` once the generation is complete.

    Raises :class:`policy.errors.EngineFailed`, and a 499 if the client has disconnected.
    """
    if events is not None:
        return _EventStream(generation, events)
    async with _aborting(generation, request.receive):
        try:
            await generation.finish()
        except RequestAborted:
            raise ApiError(499, "the client closed the request") from None
    return answer(whole())


class _EventStream(Response):
    """Server-sent events as they are made."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._generation = generation
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with _aborting(self._generation, receive):
            try:
                async for data in self._events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except RequestAborted:
                return
            except EngineFailed as error:
                # As vLLM: an error event, then [DONE].
                data = event(_error_body(500, str(error))) + DONE
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
