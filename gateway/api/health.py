"""`/livez`, `/readyz`, `/metrics`: what orchestrators and Prometheus ask."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.api.dependencies import GatewayServices
from gateway.api.responses import JsonResponse
from gateway.control.document import FollowedDeployment
from gateway.intake.adapter_catalog import CatalogView
from gateway.routing.fleet import FleetView

router = APIRouter()


class Readiness:
    """Whether one worker should be sent requests. ``draining`` once it accepts no more."""

    def __init__(self, document: FollowedDeployment, fleet: FleetView, catalog: CatalogView) -> None:
        self._document = document
        self._fleet = fleet
        self._catalog = catalog
        self.draining = False

    def why_not(self) -> list[str]:
        """The reasons why this worker cannot serve; empty when it is ready."""
        reasons = []
        if self.draining:
            reasons.append("draining")
        if not self._fleet.models:
            reasons.append("no model is known")
        if self._document.deployment.needs_controller and self._fleet.source == "none":
            reasons.append("the controller was not seen yet and no last fleet is on disk")
        elif self._catalog.wanted and not self._catalog.known:
            reasons.append("the controller has not sent the adapter catalog yet")
        return reasons


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
