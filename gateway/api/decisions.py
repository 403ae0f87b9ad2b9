"""`/admin/decisions`: the scaling decisions in the controller's log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from gateway.api.dependencies import GatewayServices
from gateway.api.responses import JsonResponse
from policy.wire.controller import DECISIONS, with_query

router = APIRouter()


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
