"""Tenants, API keys, admin keys and the audit trail: answered by the accounting process of this host."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.security import HTTPBearer

from gateway.api.dependencies import CurrentActor, GatewayServices, JsonResponse
from gateway.protocol.errors import Refused
from policy.wire.accounting import ADMIN_KEYS, AUDIT, KEYS, TENANTS, item_path
from policy.wire.controller import with_query

router = APIRouter(dependencies=[Depends(HTTPBearer(scheme_name="token", auto_error=False))])

_ENDED = Annotated[bool, Query(alias="all", description="Also revoked and expired ones.")]


@router.get("/admin/tenants", summary="Tenants with their limits, and their counts on this host")
async def tenants(services: GatewayServices, actor: CurrentActor) -> JsonResponse:
    """Declared ones and those of the database, with sums over the workers of this host since they started."""
    counts = {entry["name"]: entry for entry in services.tenants.describe()}
    try:
        answer = await services.accounting.ask("GET", TENANTS, actor=actor)
    except Refused as refused:
        problem = {"code": refused.code, "message": refused.message}
        return JsonResponse({"tenants": list(counts.values()), "problem": problem})
    known: list[dict[str, Any]] = msgspec.json.decode(answer)
    merged = [view | counts.pop(view["name"], {}) for view in known]
    return JsonResponse({"tenants": merged + list(counts.values())})


@router.post("/admin/tenants", summary="Create a tenant in the database")
async def create_tenant(services: GatewayServices, actor: CurrentActor, request: Request) -> JsonResponse:
    """The body has ``name`` and any of the limits and permissions of a tenant in the deployment file."""
    return JsonResponse(await services.accounting.ask("POST", TENANTS, await request.body(), actor=actor))


@router.get("/admin/tenants/{name}", summary="One tenant with its limits")
async def tenant(services: GatewayServices, actor: CurrentActor, name: str) -> JsonResponse:
    """Without its counts."""
    return JsonResponse(await services.accounting.ask("GET", item_path(TENANTS, name), actor=actor))


@router.patch("/admin/tenants/{name}", summary="Change limits and permissions of a tenant")
async def update_tenant(
    services: GatewayServices, actor: CurrentActor, name: str, request: Request
) -> JsonResponse:
    """The members of the body are set, ``null`` removes a limit; ``blocked`` refuses all keys."""
    path = item_path(TENANTS, name)
    return JsonResponse(await services.accounting.ask("PATCH", path, await request.body(), actor=actor))


@router.delete("/admin/tenants/{name}", summary="Delete a tenant, and revoke its keys")
async def delete_tenant(services: GatewayServices, actor: CurrentActor, name: str) -> JsonResponse:
    """The tenant as it was."""
    return JsonResponse(await services.accounting.ask("DELETE", item_path(TENANTS, name), actor=actor))


@router.get("/admin/limits", summary="What is left of the limits in use on this host, of tenants and keys")
async def limits(services: GatewayServices) -> JsonResponse:
    """Those that requests of the last minute named; ``share`` is this host's part of a limit."""
    return JsonResponse({"limits": services.limits()})


@router.get("/admin/keys", summary="API keys: their tenants, limits and states, never the keys")
async def keys(
    services: GatewayServices,
    actor: CurrentActor,
    tenant: Annotated[str | None, Query(description="Only this tenant's.")] = None,
    ended: _ENDED = False,
) -> JsonResponse:
    """Declared keys first; they have no limits of their own."""
    path = with_query(KEYS, tenant=tenant, all="true" if ended else None)
    return JsonResponse(await services.accounting.ask("GET", path, actor=actor))


@router.post("/admin/keys", summary="Create an API key, which only this answer shows")
async def create_key(services: GatewayServices, actor: CurrentActor, request: Request) -> JsonResponse:
    """The body has ``tenant``, optionally ``alias``, ``duration`` or ``expires``, and limits of the key."""
    return JsonResponse(await services.accounting.ask("POST", KEYS, await request.body(), actor=actor))


@router.get("/admin/keys/{key_id}", summary="One API key, without the key")
async def key(services: GatewayServices, actor: CurrentActor, key_id: str) -> JsonResponse:
    """Its tenant, limits and state."""
    return JsonResponse(await services.accounting.ask("GET", item_path(KEYS, key_id), actor=actor))


@router.post("/admin/keys/{key_id}/rotate", summary="Replace an API key by a new one with the same limits")
async def rotate_key(
    services: GatewayServices, actor: CurrentActor, key_id: str, request: Request
) -> JsonResponse:
    """An optional body has ``grace_s``: for how long the old key stays valid."""
    path = item_path(KEYS, key_id, "rotate")
    return JsonResponse(await services.accounting.ask("POST", path, await request.body(), actor=actor))


@router.delete("/admin/keys/{key_id}", summary="Revoke an API key")
async def revoke_key(services: GatewayServices, actor: CurrentActor, key_id: str) -> JsonResponse:
    """New requests with it are answered 401 on all hosts within a second."""
    return JsonResponse(await services.accounting.ask("DELETE", item_path(KEYS, key_id), actor=actor))


@router.get("/admin/admin-keys", summary="Keys for the admin port, with their roles, never the keys")
async def admin_keys(services: GatewayServices, actor: CurrentActor, ended: _ENDED = False) -> JsonResponse:
    """Oldest first."""
    path = with_query(ADMIN_KEYS, all="true" if ended else None)
    return JsonResponse(await services.accounting.ask("GET", path, actor=actor))


@router.post("/admin/admin-keys", summary="Create a key for the admin port, which only this answer shows")
async def create_admin_key(services: GatewayServices, actor: CurrentActor, request: Request) -> JsonResponse:
    """The body has ``name``, ``role`` (viewer, operator, admin), optionally ``duration`` or ``expires``."""
    body = await request.body()
    return JsonResponse(await services.accounting.ask("POST", ADMIN_KEYS, body, actor=actor))


@router.delete("/admin/admin-keys/{name}", summary="Revoke a key for the admin port, by its name or id")
async def revoke_admin_key(services: GatewayServices, actor: CurrentActor, name: str) -> JsonResponse:
    """It is refused on all hosts within a second."""
    return JsonResponse(await services.accounting.ask("DELETE", item_path(ADMIN_KEYS, name), actor=actor))


@router.get("/admin/audit", summary="Changes: who made which, when, before and after")
async def audit(  # noqa: PLR0917 - FastAPI passes them by name
    services: GatewayServices,
    actor: CurrentActor,
    last: Annotated[int, Query(ge=1, le=10_000)] = 100,
    actor_name: Annotated[str | None, Query(alias="actor", description="Only by this one.")] = None,
    target: Annotated[str | None, Query(description="Only of this one.")] = None,
    action: Annotated[str | None, Query(description="Only actions that begin so: key.")] = None,
    since: Annotated[float | None, Query(ge=0, allow_inf_nan=False, description="Unix seconds.")] = None,
    before_number: Annotated[int | None, Query(ge=0, description="Only older entries.")] = None,
) -> JsonResponse:
    """Newest first."""
    path = with_query(
        AUDIT, last=last, actor=actor_name, target=target, action=action, since=since,
        before_number=before_number,
    )  # fmt: skip
    return JsonResponse(await services.accounting.ask("GET", path, actor=actor))
