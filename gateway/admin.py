"""The admin port: health, metrics, the fleet, tenants and routes, and the schema of the client port."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Response

from gateway.fleet import FleetView
from gateway.metrics import Metrics
from gateway.router import Routes
from gateway.schema import describe
from gateway.tenants import Tenants

_JSON = "application/json"


def admin_app(
    fleet: FleetView,
    metrics: Metrics,
    routes: Routes,
    tenants: Tenants,
    why_not_ready: Callable[[], list[str]],
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

    own = app.openapi

    def schema() -> dict[str, Any]:
        described = own()
        describe(described)
        return described

    app.openapi = schema  # type: ignore[method-assign] # FastAPI documents this as the way to extend it
    return app


def _answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type=_JSON)
