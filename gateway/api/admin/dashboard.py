"""Endpoints of the page: the live state as server-sent events, the history, and overrides.

The state of models is the controller's; without one there is what this worker knows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer

from gateway.api.controller_proxy import LIVE_WITHIN_S
from gateway.api.dependencies import CurrentActor, GatewayServices, JsonResponse, Services, while_allowed
from gateway.protocol.errors import Refused
from policy.wire.controller import HISTORY, LIVE, MODE, SCALE, with_query

EVERY_S = 1.0
# Routes of this worker, where no controller collects those of all.
MAX_ROUTES = 20

router = APIRouter(dependencies=[Depends(HTTPBearer(scheme_name="token", auto_error=False))])


@router.get("/admin/live", summary="The state of models, replicas and tenants, now or as it changes")
async def live(services: GatewayServices, request: Request) -> Response:
    """One state as JSON; with Accept: text/event-stream, one a second as server-sent events."""
    if "text/event-stream" in request.headers.get("accept", ""):
        events = while_allowed(request, _events(services))
        return StreamingResponse(
            events, media_type="text/event-stream", headers={"cache-control": "no-store"}
        )
    return JsonResponse(await _state(services))


@router.get("/admin/history", summary="Replicas, load, latencies and proposals of up to a day, by model")
async def history(
    services: GatewayServices,
    model: Annotated[str | None, Query(description="Only this model's.")] = None,
    since: Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="Unix seconds.")] = None,
    until: Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="Unix seconds.")] = None,
    step_s: Annotated[
        float, Query(ge=0, le=86_400, description="Seconds that one row covers; 0: rows as stored.")
    ] = 0.0,
) -> JsonResponse:
    """One row for each decision of the last hour and for each minute before it."""
    path = with_query(HISTORY, model=model, since=since, until=until, step_s=step_s)
    return JsonResponse(await services.controller.ask("GET", path))


@router.post("/admin/scale", summary="Override the replica count of a model, or clear the override")
async def scale(services: GatewayServices, actor: CurrentActor, request: Request) -> JsonResponse:
    """The body is ``{"model": ..., "replicas": N or "auto", "for_s": seconds or null}``."""
    return JsonResponse(await services.controller.ask("POST", SCALE, await request.body(), actor=actor))


@router.post("/admin/mode", summary="Override the mode of a model, or clear the override")
async def mode(services: GatewayServices, actor: CurrentActor, request: Request) -> JsonResponse:
    """The body is ``{"model": ..., "mode": NAME or "auto", "for_s": seconds or null}``."""
    return JsonResponse(await services.controller.ask("POST", MODE, await request.body(), actor=actor))


async def _state(services: Services) -> dict[str, Any]:
    """The controller's state, or why there is none, and what this worker knows itself."""
    state: dict[str, Any] = {
        "worker": os.getpid(),
        "controller": None,
        "problem": None,
        "fleet": services.fleet.describe(),
        "tenants": await services.tenants.describe(),
    }
    try:
        live = await services.controller.ask("GET", LIVE, within_s=LIVE_WITHIN_S)
        state["controller"] = msgspec.Raw(live)
    except Refused as refused:
        state["problem"] = {"code": refused.code, "message": refused.message}
        state["routes"] = services.routers.describe(MAX_ROUTES)
    return state


async def _events(services: Services) -> AsyncGenerator[bytes, None]:
    while True:
        yield b"event: live\ndata: " + msgspec.json.encode(await _state(services)) + b"\n\n"
        await asyncio.sleep(EVERY_S)
