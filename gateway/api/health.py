"""`/health` and `/ping` on the client port: what load balancers and vLLM's clients ask, without a key."""

from __future__ import annotations

from fastapi import APIRouter, Response

from gateway.api.dependencies import GatewayServices
from gateway.protocol.errors import Refused
from policy.errors import Refusal

router = APIRouter()


@router.get("/health", response_class=Response, summary="Whether this gateway can serve requests")
@router.get("/ping", response_class=Response, summary="As /health")
async def health(services: GatewayServices) -> Response:
    """200 without a body, as vLLM answers, or 503 with the reason."""
    if reasons := services.not_ready():
        raise Refused(Refusal.STARTING, f"The gateway cannot serve: {'; '.join(reasons)}.")
    return Response()
