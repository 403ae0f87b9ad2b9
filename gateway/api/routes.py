"""The client port: exact paths to raw ASGI handlers, in front of any request object.

Paths are compared as ``scope["path"]``, never as a URL built from the Host header.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.models import ModelList
from gateway.call import Call
from gateway.intake.tenants import TenantAccount, Tenants
from gateway.protocol.errors import Refused, unknown
from gateway.protocol.paths import MODELS_PATH, ROUTES, Route
from policy.errors import Refusal

Serve = Callable[[Route, Scope, Receive, Send], Awaitable[None]]

_MODELS = Route(MODELS_PATH, b"", "List the models")
_NOWHERE = Route("", b"", "")


def client_app(serve: Serve, listing: ModelList, tenants: Tenants) -> ASGIApp:
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
            body = _answer(listing, path, scope["method"], route, lambda: tenants.of(call.headers))
        except Refused as refused:
            await call.refuse(refused)
        else:
            await call.answer(200, [(b"content-type", b"application/json")], body)

    return app


def _answer(
    listing: ModelList, path: str, method: str, route: Route | None, authorize: Callable[[], TenantAccount]
) -> bytes:
    """The body for a path that needs no replica; raises :class:`gateway.protocol.errors.Refused`."""
    everything = path == MODELS_PATH
    one = path.removeprefix(MODELS_PATH + "/") if path.startswith(MODELS_PATH + "/") else ""
    if route is None and not everything and not one:
        raise Refused(Refusal.NOT_FOUND, "There is nothing at this path.")
    if method != "GET" or route is not None:
        allowed = "POST" if route is not None else "GET"
        raise Refused(Refusal.METHOD_NOT_ALLOWED, f"This path takes {allowed} alone.")
    account = authorize()
    if everything:
        return listing.all(account)
    card = listing.one(one, account)
    if card is None:
        raise unknown(one)
    return card
