"""`/v1/models`: the models and adapters that the caller may use."""

from __future__ import annotations

from fastapi import APIRouter

from gateway.api.dependencies import Caller, GatewayServices, JsonResponse
from gateway.protocol.errors import unknown

router = APIRouter(prefix="/v1/models")


@router.get("", summary="List the models")
async def list_models(caller: Caller, services: GatewayServices) -> JsonResponse:
    """Every model and adapter that the key's tenant may use."""
    return JsonResponse(await services.models.all(caller))


@router.get("/{name:path}", summary="One model")
async def one_model(name: str, caller: Caller, services: GatewayServices) -> JsonResponse:
    """A model, or an adapter as NAME, BASE:NAME, or either with @ and 12 digits of a digest."""
    card = services.models.one(name, caller)
    if card is None:
        raise unknown(name)
    return JsonResponse(card)
