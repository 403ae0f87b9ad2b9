"""`/livez`, `/readyz`, `/metrics`: what orchestrators and Prometheus ask."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.api.dependencies import GatewayServices
from gateway.api.responses import JsonResponse

router = APIRouter()


@router.get("/livez", summary="The worker's event loop runs")
async def livez() -> JsonResponse:
    """Liveness."""
    return JsonResponse({"live": True})


@router.get("/readyz", summary="Whether the worker can serve, or why not")
async def readyz(services: GatewayServices) -> JsonResponse:
    """Readiness: 503 with the reasons when the worker cannot serve."""
    reasons = services.readiness.why_not()
    return JsonResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@router.get("/metrics", summary="Prometheus metrics of all workers")
async def prometheus(services: GatewayServices) -> Response:
    """Prometheus' text format."""
    return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
