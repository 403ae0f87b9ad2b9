"""Cross-origin requests (CORS): what pages of allowed origins may send to the client port, and read there.

The rules are those of Starlette's middleware, which would await each part of a stream.
"""

from __future__ import annotations

from collections.abc import Awaitable

from fastapi import Response
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Scope, Send

from gateway.api.openapi_schema import LIMIT_HEADERS
from gateway.request_context import CORS_HEADERS
from policy.wire.headers import DROPPED_HEADER, EXPLAIN_HEADER, REPLICA_HEADER

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED = (
    "x-request-id", "request-id", "retry-after", "x-should-retry", "traceresponse",
    REPLICA_HEADER, EXPLAIN_HEADER, DROPPED_HEADER, *LIMIT_HEADERS,
)  # fmt: skip


class Cors:
    """The rules for pages of ``origins``, or of all with ``*``. Keys are headers: cookies are not allowed."""

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self._rules = CORSMiddleware(
            app, origins, allow_methods=_METHODS, allow_headers=("*",), expose_headers=_EXPOSED
        )
        self._simple = [
            (name.lower().encode(), value.encode()) for name, value in self._rules.simple_headers.items()
        ]

    def preflight(self, scope: Scope) -> Response | None:
        """The answer to a browser that asks whether a page may send a request, ``None`` to other requests."""
        if scope["method"] != "OPTIONS":
            return None
        headers = Headers(scope=scope)
        if "origin" not in headers or "access-control-request-method" not in headers:
            return None
        return self._rules.preflight_response(headers)

    def headers(self, received: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """The headers that let the page read the answer to a request with those that were ``received``."""
        more = [(b"vary", b"Origin")]
        origin = received.get(b"origin")
        if origin is not None:
            more += self._simple
            if not self._rules.allow_all_origins and self._rules.is_allowed_origin(origin.decode("latin-1")):
                more.append((b"access-control-allow-origin", origin))
        return more

    def sender(self, scope: Scope, send: Send) -> Send:
        """``send`` with the headers that let the page read the answer."""
        more = scope[CORS_HEADERS] = self.headers(dict(scope["headers"]))

        def send_with_headers(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *more]}
            return send(message)

        return send_with_headers
