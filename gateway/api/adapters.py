"""`/admin/adapters`: add, remove, split and roll back adapters, by way of the controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from gateway.api.dependencies import GatewayServices, same_site
from gateway.api.responses import JsonResponse, NdjsonResponse
from gateway.protocol.errors import Refused
from policy.wire.controller import ADAPTERS, adapter_path

router = APIRouter(prefix="/admin/adapters")
_SAME_SITE = [Depends(same_site)]


@router.get("", summary="Adapters: versions, where they are loaded, and how they are used")
async def adapters(services: GatewayServices) -> JsonResponse:
    """The controller's status of all adapters."""
    return JsonResponse(await services.controller.ask("GET", ADAPTERS))


@router.post(
    "",
    summary="Add an adapter, or a version of one; with Accept: application/x-ndjson, report the progress",
    dependencies=_SAME_SITE,
)
async def add(services: GatewayServices, request: Request) -> Response:
    """The new alias; or lines of progress, of which the last has the alias or an error."""
    lines = services.controller.lines(ADAPTERS, await request.body(), "alias")
    if NdjsonResponse.media_type not in request.headers.get("accept", ""):
        return JsonResponse([line async for line in lines][-1])
    first = await anext(lines)  # what is refused at once has its own status
    return NdjsonResponse(_progress(first, lines))


@router.delete("/{model:path}/{name}", summary="Remove an adapter's name", dependencies=_SAME_SITE)
async def remove(services: GatewayServices, model: str, name: str) -> JsonResponse:
    """Requests for the name are answered 404 from then on."""
    return JsonResponse(await services.controller.ask("DELETE", adapter_path(model, name)))


@router.post(
    "/{model:path}/{name}/split",
    summary="Split a name's requests over several versions, by weight",
    dependencies=_SAME_SITE,
)
async def split(services: GatewayServices, model: str, name: str, request: Request) -> JsonResponse:
    """The body maps versions (``v1``) to weights."""
    path = adapter_path(model, name, "split")
    return JsonResponse(await services.controller.ask("POST", path, await request.body()))


@router.post(
    "/{model:path}/{name}/rollback",
    summary="Return a name to the versions it had before",
    dependencies=_SAME_SITE,
)
async def rollback(services: GatewayServices, model: str, name: str) -> JsonResponse:
    """The alias after the rollback."""
    return JsonResponse(await services.controller.ask("POST", adapter_path(model, name, "rollback")))


async def _progress(first: dict[str, Any], lines: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Progress line by line; an error is the last line."""
    yield msgspec.json.encode(first) + b"\n"
    try:
        async for line in lines:
            yield msgspec.json.encode(line) + b"\n"
    except Refused as refused:
        yield refused.body() + b"\n"
