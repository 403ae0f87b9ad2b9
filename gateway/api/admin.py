"""The admin port: health, metrics, and what is served, decided and loaded; and the client port's schema."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway.api.controller_proxy import ControllerProxy, adapter_path, decisions_path
from gateway.intake.tenants import Tenants
from gateway.protocol.errors import Refused
from gateway.protocol.openapi import add_client_schema
from gateway.routing.fleet import FleetView
from gateway.routing.router import ModelRouters
from gateway.telemetry.metrics import Metrics
from policy.errors import Refusal

_JSON = "application/json"
_NDJSON = "application/x-ndjson"


def admin_app(
    fleet: FleetView,
    metrics: Metrics,
    routes: ModelRouters,
    tenants: Tenants,
    why_not_ready: Callable[[], list[str]],
    *,
    control: ControllerProxy,
    capture: Callable[[], AsyncIterator[bytes]],
) -> FastAPI:
    """The app of the admin port, which also publishes what the client port speaks.

    Workers share the port, so that what only one of them knows says by its process id whose it is.
    """
    app = FastAPI(title="Tidegate", description="The admin port, and the schema of the client port.")

    @app.get("/livez", summary="The worker's event loop turns")
    async def livez() -> Response:
        return _answer({"live": True})

    @app.get("/readyz", summary="The worker can serve, or why it cannot")
    async def readyz() -> Response:
        reasons = why_not_ready()
        return _answer({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    @app.get("/metrics", summary="Prometheus metrics of all workers")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/admin/fleet", summary="The fleet as this worker sees it, with its age")
    async def admin_fleet() -> Response:
        return _answer(fleet.describe())

    @app.get("/admin/routes", summary="The last decisions of this worker: the candidates and their seconds")
    async def admin_routes(limit: Annotated[int, Query(ge=1, le=1000)] = 20) -> Response:
        return _answer({"worker": os.getpid(), "routes": routes.describe(limit)})

    @app.get("/admin/tenants", summary="Weights and classes, and what each has and had in this worker")
    async def admin_tenants() -> Response:
        return _answer({"worker": os.getpid(), "tenants": tenants.describe()})

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return _refusal(error)

    @app.exception_handler(HTTPException)
    async def nowhere(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code != 405:
            return _refusal(Refused(Refusal.NOT_FOUND, "There is nothing at this path."))
        # The framework names the methods of the first route alone.
        here = [route for route in app.routes if isinstance(route, Route)]
        here = [route for route in here if route.path_regex.match(request.scope["path"])]
        allowed = sorted(set().union(*(route.methods or () for route in here)))
        said = f"This path takes {' and '.join(allowed)} alone."
        answer = _refusal(Refused(Refusal.METHOD_NOT_ALLOWED, said))
        answer.headers["allow"] = ", ".join(allowed)
        return answer

    @app.exception_handler(RequestValidationError)
    async def bad_value(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"][1:])  # the first says query, path or header
        message = f"{param}: got {first['input']!r}; {first['msg']}."
        return _refusal(Refused(Refusal.BAD_REQUEST, message, param=param, code="bad_value"))

    @app.get("/admin/adapters", summary="Adapters: versions, where they are loaded, and how they are used")
    async def adapters() -> Response:
        return Response(await control.ask("GET", "/adapters"), media_type=_JSON)

    @app.post(
        "/admin/adapters",
        summary="Add an adapter, or a version of it; as application/x-ndjson with its progress",
        dependencies=[Depends(_same_site)],
    )
    async def add(request: Request) -> Response:
        lines = control.lines("/adapters", await request.body(), "alias")
        if _NDJSON not in request.headers.get("accept", ""):
            return _answer([said async for said in lines][-1])
        first = await anext(lines)  # what is refused at once has its own status
        return StreamingResponse(_told(first, lines), media_type=_NDJSON)

    @app.delete(
        "/admin/adapters/{model:path}/{name}",
        summary="Take an adapter's name away",
        dependencies=[Depends(_same_site)],
    )
    async def remove(model: str, name: str) -> Response:
        return Response(await control.ask("DELETE", adapter_path(model, name)), media_type=_JSON)

    @app.post(
        "/admin/adapters/{model:path}/{name}/split",
        summary="Let a name stand for several versions, by weight",
        dependencies=[Depends(_same_site)],
    )
    async def split(model: str, name: str, request: Request) -> Response:
        path = adapter_path(model, name, "split")
        return Response(await control.ask("POST", path, await request.body()), media_type=_JSON)

    @app.post(
        "/admin/adapters/{model:path}/{name}/rollback",
        summary="Let a name stand for what it stood for before",
        dependencies=[Depends(_same_site)],
    )
    async def rollback(model: str, name: str) -> Response:
        return Response(await control.ask("POST", adapter_path(model, name, "rollback")), media_type=_JSON)

    @app.get("/admin/decisions", summary="What the controller decided: the last, or those about an instant")
    async def decisions(
        model: Annotated[str | None, Query(description="Of this model alone.")] = None,
        last: Annotated[int | None, Query(ge=1, le=1000, description="How many of each model.")] = None,
        at: Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="Unix seconds.")] = None,
    ) -> Response:
        path = decisions_path(model=model, last=last, at=at)
        return Response(await control.ask("GET", path), media_type=_JSON)

    @app.get(
        "/admin/capture",
        summary="What all workers serve from now on: lengths, times and hashes as NDJSON, never text",
        dependencies=[Depends(_same_site)],
    )
    async def captured() -> Response:
        return StreamingResponse(capture(), media_type=_NDJSON)

    own = app.openapi

    def schema() -> dict[str, Any]:
        described = own()
        add_client_schema(described)
        return described

    app.openapi = schema  # type: ignore[method-assign] # FastAPI documents this as the way to extend it
    return app


def _answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type=_JSON)


def _refusal(refused: Refused) -> Response:
    headers = {name.decode(): value.decode() for name, value in refused.headers()}
    return Response(refused.body(), refused.status, headers, _JSON)


async def _told(first: dict[str, Any], lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Progress line by line; an error is the last line."""
    yield msgspec.json.encode(first) + b"\n"
    try:
        async for said in lines:
            yield msgspec.json.encode(said) + b"\n"
    except Refused as refused:
        yield refused.body() + b"\n"


def _same_site(request: Request) -> None:
    """Refuse what a page of another site has a browser ask: the port is open to all of this machine."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise Refused(Refusal.BAD_REQUEST, "This comes from another site.", status=403, code="foreign_origin")
