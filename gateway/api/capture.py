"""`/admin/capture`: a live trace of the requests that all workers serve."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from gateway.api.dependencies import GatewayServices, same_site
from gateway.api.responses import NdjsonResponse

router = APIRouter()


@router.get(
    "/admin/capture",
    summary="Requests served from now on: lengths, times and hashes as NDJSON, never text",
    dependencies=[Depends(same_site)],
)
async def capture(services: GatewayServices) -> NdjsonResponse:
    """A header line, then a line for each request when it has ended."""
    return NdjsonResponse(services.capture())
