"""HTTP of internal ports: JSON answers, and errors with a status that a caller can act on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from policy.errors import TidegateError
from policy.wire.controller import answer_of, problem_of

Handler = Callable[[Request], Awaitable[Response]]


def json_answer(value: object, status: int = 200) -> Response:
    """``value`` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_answer(status: int, kind: str, message: str) -> Response:
    """An error that is none of Tidegate's own."""
    return json_answer({"error": {"type": kind, "message": message}}, status)


def refusing(handler: Handler) -> Handler:
    """Answer refusals as 400, 404 or 409 and undecodable bodies as 400, with what the caller can act on."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except TidegateError as error:
            return json_answer({"error": problem_of(error)}, answer_of(type(error).__name__).status)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # msgspec raises the second for text that is not UTF-8.
            return error_answer(400, "BadRequest", str(error))

    return wrapped
