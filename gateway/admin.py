"""The admin port: health, metrics, the fleet, and the schema of the client port."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Response

from gateway.fleet import FleetView
from gateway.metrics import Metrics
from gateway.surface import MODELS_PATH, ROUTES

JSON = "application/json"


def admin_app(fleet: FleetView, metrics: Metrics, why_not_ready: Callable[[], list[str]]) -> FastAPI:
    """The app of the admin port, which also publishes what the client port speaks."""
    app = FastAPI(title="Tidegate", description="The admin port, and the schema of the client port.")

    @app.get("/livez", summary="The worker's event loop turns")
    async def livez() -> Response:
        return Response(msgspec.json.encode({"live": True}), media_type=JSON)

    @app.get("/readyz", summary="The worker can serve, or why it cannot")
    async def readyz() -> Response:
        reasons = why_not_ready()
        body = msgspec.json.encode({"ready": not reasons, "reasons": reasons})
        return Response(body, status_code=503 if reasons else 200, media_type=JSON)

    @app.get("/metrics", summary="Prometheus metrics of all workers")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/admin/fleet", summary="The fleet as this worker sees it, with its age")
    async def admin_fleet() -> Response:
        return Response(msgspec.json.encode(fleet.describe()), media_type=JSON)

    own = app.openapi

    def schema() -> dict[str, Any]:
        described = own()
        described["paths"].update(_client_paths())
        return described

    app.openapi = schema  # type: ignore[method-assign] # FastAPI documents this as the way to extend it
    return app


def _client_paths() -> dict[str, Any]:
    body = {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["model"],
                    "properties": {
                        "model": {"type": "string"},
                        "stream": {"type": "boolean", "nullable": True},
                    },
                }
            }
        },
    }
    answers = {"200": {"description": "What the engine answered"}, "4XX": {"description": "A refusal"}}
    paths: dict[str, Any] = {
        path: {"post": {"summary": route.summary, "requestBody": body, "responses": answers}}
        for path, route in ROUTES.items()
    }
    paths[MODELS_PATH] = {"get": {"summary": "List the models", "responses": answers}}
    paths[MODELS_PATH + "/{id}"] = {
        "get": {
            "summary": "One model",
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "responses": answers,
        }
    }
    return paths
