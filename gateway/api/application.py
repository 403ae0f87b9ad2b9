"""The FastAPI application of the gateway, one instance per port. Its hot paths bypass FastAPI's router.

To add an endpoint, write it into the module of its topic in this folder. A new topic is a new module with
a ``router``, listed in :data:`CLIENT_ROUTERS` or :data:`ADMIN_ROUTERS`. The client port is an allowlist:
it has the routes of its own instance, and what is not listed here answers 404.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from time import monotonic
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.api import external_metrics, health, models_endpoint, static_page, swagger_ui
from gateway.api.admin import dashboard, fleet_and_adapters, playground, tenancy, usage
from gateway.api.admin.authorization import AdminAuthorization
from gateway.api.cors import Cors
from gateway.api.dependencies import TENANT, Services
from gateway.api.openapi_schema import add_errors, add_hot_routes
from gateway.http.asgi_exchange import id_headers, request_ids
from gateway.protocol.errors import Refused
from gateway.protocol.paths import ROUTES, is_anthropic
from gateway.protocol.paths import ProxyRoute as HotRoute
from policy.config.deployment import GatewayConfig
from policy.errors import Refusal
from policy.wire.accounting_api import AuditActor

CLIENT_ROUTERS = (models_endpoint.router, health.router, swagger_ui.router)
ADMIN_ROUTERS = (
    fleet_and_adapters.health,
    external_metrics.router,
    fleet_and_adapters.router,
    dashboard.router,
    tenancy.router,
    usage.router,
    playground.router,
    static_page.router,
    swagger_ui.router,
)

Serve = Callable[[HotRoute, Scope, Receive, Send], Awaitable[None]]


class Application(FastAPI):
    """A FastAPI application that serves POST requests to ``hot`` paths, raw ASGI apps, before its middleware.

    A hot path is a route of the router too, for its schema and wrong methods;
    docs/adr/0006-the-hot-routes-are-raw-asgi.md has the measurement.
    """

    def __init__(
        self,
        services: Services,
        routers: Iterable[APIRouter],
        *,
        title: str,
        description: str,
        hot: dict[str, ASGIApp] | None = None,
    ) -> None:
        super().__init__(
            title=title, description=description, docs_url=None, redoc_url=None, redirect_slashes=False
        )
        self.state.services = services
        self.hot = hot or {}
        self._cors: Cors | None = None
        for router in routers:
            self.include_router(router)
        for path, app in self.hot.items():
            self.router.routes.append(Route(path, _RawEndpoint(app), methods=["POST"]))
        self.add_exception_handler(Refused, _refused)
        self.add_exception_handler(HTTPException, _not_routed)
        self.add_exception_handler(RequestValidationError, _bad_value)
        self.add_exception_handler(Exception, _failed)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        """Return the coroutine that serves the request; no frame of this class stays around a hot one."""
        if (cors := self._cors) is not None:
            if (preflight := cors.preflight(scope)) is not None:
                return self._route(scope, receive, send, preflight)
            send = cors.sender(scope, send)
        app = self.hot.get(scope["path"])
        if app is not None and scope["method"] == "POST":
            return app(scope, receive, send)
        return self._route(scope, receive, send, super().__call__)

    def allow_origins(self, origins: tuple[str, ...]) -> None:
        """Let web pages of ``origins`` use this port (``*``: of all)."""
        self._cors = Cors(self, origins) if origins else None

    def cors_headers(self, received: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """The headers that let a page read an answer given before this application has the request."""
        return [] if self._cors is None else self._cors.headers(received)

    async def _route(self, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
        """Serve by ``app``, mostly FastAPI's router. HEAD is GET without the body.

        Every answer and every logged error has the id of its request.
        """
        headers, method = dict(scope["headers"]), scope["method"]
        request_id, _ = request_ids(headers.get(b"x-request-id"))
        ids = id_headers(request_id, anthropic=is_anthropic(scope["path"]))
        began, status = monotonic(), 0
        headless = method == "HEAD"
        if headless:
            scope = {**scope, "method": "GET"}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                await send({**message, "headers": [*message["headers"], *ids]})
                if headless:  # not at the end of a body that may have none
                    await send({"type": "http.response.body"})
            elif not headless:
                await send(message)

        services: Services = self.state.services
        try:
            await app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - the client has its answer from `_failed`
            services.log.error(
                "call_failed", cause=error, route=_template(scope), request_id=request_id.decode()
            )
        finally:
            if services.access.on:
                services.access.other(
                    request_id, method, _template(scope),
                    client=scope.get("client"), tenant=scope.get(TENANT, ""),
                    status=status, seconds=monotonic() - began,
                )  # fmt: skip

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI schema, made once."""
        if self.openapi_schema is None:
            schema = super().openapi()
            add_errors(schema)
            if self.hot:
                add_hot_routes(schema)
            self.openapi_schema = schema
        return self.openapi_schema


def _template(scope: Scope) -> str:
    """The path of the route that matched, as it was declared; empty if none did."""
    return getattr(scope.get("route"), "path", "")


class _RawEndpoint:
    """An ASGI app as the endpoint of a route: Starlette takes a function for one of a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def client_app(
    services: Services, serve: Serve, routers: Iterable[APIRouter] = CLIENT_ROUTERS
) -> Application:
    """The application of the client port; ``serve`` is the pipeline of the hot routes."""
    return Application(
        services,
        routers,
        title="Tidegate",
        description="The client port: an OpenAI-compatible API.",
        hot={path: partial(serve, route) for path, route in ROUTES.items()},
    )


def admin_app(
    services: Services, token: Callable[[], str], gateway: Callable[[], GatewayConfig]
) -> Application:
    """The application of the admin port. Workers share the port: an answer about one worker has its pid."""
    app = Application(
        services,
        ADMIN_ROUTERS,
        title="Tidegate admin",
        description="The admin port: health, metrics and operations.",
    )

    def actor(key: bytes) -> AuditActor | None:
        return services.admin_keys.actor(key)

    app.add_middleware(AdminAuthorization, token=token, actor=actor, gateway=gateway)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    body = error.body(anthropic=is_anthropic(request.scope["path"]))
    return Response(body, error.status, headers)


async def _not_routed(request: Request, error: Exception) -> Response:
    """Answer 405 with the path's methods, or 404."""
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return await _refused(request, Refused(Refusal.NOT_FOUND, "There is nothing at this path."))
    # The framework names the methods of the first matching route alone.
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = set().union(*(route.methods or () for route in matching))
    allowed = sorted(methods | {"HEAD"} if "GET" in methods else methods)
    message = f"This path accepts {' and '.join(allowed)} only."
    answer = await _refused(request, Refused(Refusal.METHOD_NOT_ALLOWED, message))
    answer.headers["allow"] = ", ".join(allowed)
    return answer


async def _bad_value(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])  # the first part is query, path or header
    message = f"{param}: got {first['input']!r}; {first['msg']}."
    return await _refused(request, Refused(Refusal.BAD_REQUEST, message, param=param, code="bad_value"))


async def _failed(request: Request, error: Exception) -> Response:
    """An error of ours: it is logged, and the client gets no detail."""
    return await _refused(request, Refused(Refusal.INTERNAL, "The gateway failed to serve the request."))
