"""The admin port's endpoints: health, metrics, the fleet, decisions, capture, and adapter operations.

Decisions and adapter operations are answered by the controller.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.security import HTTPBearer

from gateway.api.dependencies import (
    CurrentActor,
    GatewayServices,
    JsonResponse,
    NdjsonResponse,
    while_allowed,
)
from gateway.protocol.errors import Refused
from gateway.telemetry.scrape import OPENMETRICS, TEXT
from policy.wire.controller import ADAPTERS, DECISIONS, adapter_path, with_query

# Open to probes and Prometheus; everything else needs the token, which `AdminAuthorization` checks.
health = APIRouter()
router = APIRouter(dependencies=[Depends(HTTPBearer(scheme_name="token", auto_error=False))])


@health.get("/livez", summary="The worker's event loop runs")
async def livez() -> JsonResponse:
    """Liveness."""
    return JsonResponse({"live": True})


@health.get("/readyz", summary="Whether the worker can serve, or why not")
async def readyz(services: GatewayServices) -> JsonResponse:
    """Readiness: 503 with the reasons when the worker cannot serve."""
    reasons = services.not_ready()
    return JsonResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@health.get("/metrics", summary="Metrics of all workers, of the controller, and of the replicas' engines")
async def prometheus(
    services: GatewayServices,
    request: Request,
    names: Annotated[tuple[str, ...], Query(alias="name[]", description="Only these of Tidegate's")] = (),
) -> Response:
    """OpenMetrics with exemplars if it is accepted, else Prometheus' text format."""
    openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
    text = await services.scraper.scrape(names, openmetrics=openmetrics)
    return Response(text, media_type=OPENMETRICS if openmetrics else TEXT)


@router.get("/admin/fleet", summary="The fleet as this worker sees it, with its age")
async def fleet(services: GatewayServices) -> JsonResponse:
    """Models and replicas, with their load and whether requests may be sent to them."""
    return JsonResponse(services.fleet.describe())


@router.get(
    "/admin/routes", summary="The last routing decisions of this worker: candidates, predicted seconds"
)
async def routes(services: GatewayServices, limit: Annotated[int, Query(ge=1, le=1000)] = 20) -> JsonResponse:
    """The newest first."""
    return JsonResponse({"worker": os.getpid(), "routes": services.routers.describe(limit)})


@router.get("/admin/decisions", summary="The controller's last decisions, or those in force at an instant")
async def decisions(
    services: GatewayServices,
    model: Annotated[str | None, Query(description="Only this model's.")] = None,
    last: Annotated[int | None, Query(ge=1, le=1000, description="How many of each model.")] = None,
    at: Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="Unix seconds.")] = None,
) -> JsonResponse:
    """Newest first."""
    path = with_query(DECISIONS, model=model, last=last, at=at)
    return JsonResponse(await services.controller.ask("GET", path))


@router.get(
    "/admin/capture",
    summary="Requests served from now on: lengths, times and hashes as NDJSON, never text",
)
async def capture(services: GatewayServices, request: Request) -> NdjsonResponse:
    """A header line, then a line for each request when it has ended."""
    return NdjsonResponse(while_allowed(request, services.capture()))


@router.get("/admin/adapters", summary="Adapters: versions, where they are loaded, and how they are used")
async def adapters(services: GatewayServices) -> JsonResponse:
    """The controller's status of all adapters."""
    return JsonResponse(await services.controller.ask("GET", ADAPTERS))


@router.post(
    "/admin/adapters",
    summary="Add an adapter, or a version of one; with Accept: application/x-ndjson, report the progress",
)
async def add(services: GatewayServices, actor: CurrentActor, request: Request) -> Response:
    """The new alias; or lines of progress, of which the last has the alias or an error."""
    lines = services.controller.lines(ADAPTERS, await request.body(), "alias", actor=actor)
    if NdjsonResponse.media_type not in request.headers.get("accept", ""):
        return JsonResponse([line async for line in lines][-1])
    first = await anext(lines)  # what is refused at once has its own status
    return NdjsonResponse(_progress(first, lines))


async def _changing(
    services: GatewayServices, actor: CurrentActor, request: Request, model: str, name: str
) -> Callable[[str], Awaitable[JsonResponse]]:
    """Asks the controller for an operation on the adapter of the path, with the body of the request."""

    async def change(operation: str) -> JsonResponse:
        path, body = adapter_path(model, name, operation), await request.body()
        return JsonResponse(await services.controller.ask("POST", path, body, actor=actor))

    return change


Change = Annotated[Callable[[str], Awaitable[JsonResponse]], Depends(_changing)]


@router.delete("/admin/adapters/{model:path}/{name}", summary="Remove an adapter's name")
async def remove(services: GatewayServices, actor: CurrentActor, model: str, name: str) -> JsonResponse:
    """Requests for the name are answered 404 from then on."""
    return JsonResponse(await services.controller.ask("DELETE", adapter_path(model, name), actor=actor))


@router.post(
    "/admin/adapters/{model:path}/{name}/split",
    summary="Split a name's requests over several versions, by weight",
)
async def split(change: Change) -> JsonResponse:
    """The body maps versions (``v1``) to weights."""
    return await change("split")


@router.post(
    "/admin/adapters/{model:path}/{name}/rollback",
    summary="Return a name to the versions it had before",
)
async def rollback(change: Change) -> JsonResponse:
    """The alias after the rollback; an optional body names one version, ``{"to": "v1"}``."""
    return await change("rollback")


async def _progress(first: dict[str, Any], lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Progress line by line; an error is the last line."""
    yield msgspec.json.encode(first) + b"\n"
    try:
        async for line in lines:
            yield msgspec.json.encode(line) + b"\n"
    except Refused as refused:
        yield refused.body() + b"\n"
