"""The client port: exact paths to raw ASGI handlers, in front of any request object.

Paths are compared as ``scope["path"]``, never as a URL built from the Host header.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.call import Call
from gateway.errors import Refused
from gateway.fleet import FleetView, Served
from gateway.surface import MODELS_PATH, ROUTES, Route
from gateway.tenants import Tenants
from policy.errors import Refusal

Serve = Callable[[Route, Scope, Receive, Send], Awaitable[None]]

_MODELS = Route(MODELS_PATH, b"", "List the models")
_NOWHERE = Route("", b"", "")


def client_app(serve: Serve, fleet: FleetView, tenants: Tenants) -> ASGIApp:
    """The app of the client port; what there is to be served is told to tenants alone."""

    def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        route = ROUTES.get(scope["path"])
        if route is not None and scope["method"] == "POST":
            return serve(route, scope, receive, send)
        return answer(route, scope, receive, send)

    async def answer(route: Route | None, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        call = Call(route or _NOWHERE, scope, receive, send)
        try:
            body = _answer(fleet, path, scope["method"], route, lambda: tenants.of(call.headers))
        except Refused as refused:
            await call.refuse(refused)
        else:
            await call.answer(200, [(b"content-type", b"application/json")], body)

    return app


def _answer(
    fleet: FleetView, path: str, method: str, route: Route | None, authorize: Callable[[], object]
) -> bytes:
    """The body for a path that needs no replica; raises :class:`gateway.errors.Refused`."""
    listing = path == MODELS_PATH
    one = path.removeprefix(MODELS_PATH + "/") if path.startswith(MODELS_PATH + "/") else ""
    if route is None and not listing and not one:
        raise Refused(Refusal.NOT_FOUND, "There is nothing at this path.")
    if method != "GET" or route is not None:
        allowed = "POST" if route is not None else "GET"
        raise Refused(Refusal.METHOD_NOT_ALLOWED, f"This path takes {allowed} alone.")
    authorize()
    if listing:
        cards = [card for served in fleet.models for card in _cards(served)]
        return msgspec.json.encode({"object": "list", "data": cards})
    for served in fleet.models:
        for card in _cards(served):
            if card["id"] == one:
                return msgspec.json.encode(card)
    raise Refused(Refusal.UNKNOWN_MODEL, f"The model '{one[:128]}' does not exist.", param="model")


def _cards(served: Served) -> list[dict[str, object]]:
    """A model and its adapters as OpenAI lists them."""
    base: dict[str, object] = {
        "object": "model",
        "created": served.created,
        "owned_by": "tidegate",
        "root": served.name,
        "max_model_len": served.max_model_len,
    }
    return [
        {"id": served.name, **base, "parent": None},
        *({"id": adapter, **base, "parent": served.name} for adapter in served.adapters),
    ]
