"""`/admin/fleet`, `/admin/routes`, `/admin/tenants`: what one worker knows of replicas and tenants."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import APIRouter, Query

from gateway.api.dependencies import GatewayServices
from gateway.api.responses import JsonResponse

router = APIRouter(prefix="/admin")


@router.get("/fleet", summary="The fleet as this worker sees it, with its age")
async def fleet(services: GatewayServices) -> JsonResponse:
    """Models and replicas, with their load and whether requests may be sent to them."""
    return JsonResponse(services.fleet.describe())


@router.get("/routes", summary="The last routing decisions of this worker: candidates, predicted seconds")
async def routes(services: GatewayServices, limit: Annotated[int, Query(ge=1, le=1000)] = 20) -> JsonResponse:
    """The newest first."""
    return JsonResponse({"worker": os.getpid(), "routes": services.routers.describe(limit)})


@router.get("/tenants", summary="Weights and priorities of tenants, and their counts in this worker")
async def tenants(services: GatewayServices) -> JsonResponse:
    """Requests in flight and tokens served, by tenant."""
    return JsonResponse({"worker": os.getpid(), "tenants": services.tenants.describe()})
