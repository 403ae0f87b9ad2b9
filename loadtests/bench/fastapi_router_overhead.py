"""Microseconds per request in front of FastAPI's router and through it; docs/adr/0006 has the results.

``python -m loadtests.bench.fastapi_router_overhead`` runs in this process, without sockets, for about 10
seconds.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import uvloop
from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api.application import client_app
from gateway.protocol.paths import ROUTES, ProxyRoute

ROUNDS, REQUESTS = 9, 4000
BODY = b'{"model":"alpha","messages":[{"role":"user","content":"hi"}]}'
HEADERS = [(b"host", b"x"), (b"content-type", b"application/json"), (b"authorization", b"Bearer key")]
PATH = next(iter(ROUTES))


async def serve(route: ProxyRoute, scope: Scope, receive: Receive, send: Send) -> None:
    """A minimal handler: read the body and answer."""
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


async def alone(scope: Scope, receive: Receive, send: Send) -> None:
    """The handler without an application."""
    await serve(ROUTES[PATH], scope, receive, send)


async def endpoint(request: Request) -> Response:
    """The same handler as a FastAPI endpoint."""
    await request.body()
    return Response(b"{}", media_type="application/json")


async def us_per_request(app: ASGIApp, path: str) -> float:
    """Processor time of one request, the mean of :data:`REQUESTS`."""

    async def receive() -> Message:
        return {"type": "http.request", "body": BODY, "more_body": False}

    async def send(message: Message) -> None:
        pass

    common = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "query_string": b"",
        "method": "POST", "path": path, "raw_path": b"", "root_path": "", "headers": HEADERS,
    }  # fmt: skip
    began = time.process_time()
    for _ in range(REQUESTS):
        await app({**common}, receive, send)
    return (time.process_time() - began) / REQUESTS * 1e6


async def main() -> None:
    """Interleave the variants and print the fastest round of each."""
    unused: Any = SimpleNamespace()
    in_front, routed, plain = (client_app(unused, serve) for _ in range(3))
    routed.hot.clear()
    plain.add_api_route("/v1/endpoint", endpoint, methods=["POST"])
    variants: dict[str, tuple[ASGIApp, str]] = {
        "handler alone": (alone, PATH),
        "in front of the router": (in_front, PATH),
        "raw ASGI, routed": (routed, PATH),
        "FastAPI endpoint": (plain, "/v1/endpoint"),
    }
    rounds = [
        {name: await us_per_request(*variant) for name, variant in variants.items()} for _ in range(ROUNDS)
    ]
    for name in variants:
        sys.stdout.write(f"{name:24} {min(each[name] for each in rounds):6.2f} us\n")


if __name__ == "__main__":
    uvloop.run(main())
