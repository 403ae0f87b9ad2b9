"""Tenants, API keys, admin keys and the audit trail: answered by the accounting process of this host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.security import HTTPBearer

from gateway.api.dependencies import CurrentActor, GatewayServices, JsonResponse
from gateway.protocol.errors import Refused
from policy.wire.accounting_api import ADMIN_KEYS, AUDIT, KEYS, TENANTS, item_path
from policy.wire.controller import with_query

router = APIRouter(dependencies=[Depends(HTTPBearer(scheme_name="token", auto_error=False))])


async def _forwarding(
    services: GatewayServices, actor: CurrentActor, request: Request
) -> Callable[[str], Awaitable[JsonResponse]]:
    """Answers a request with what the accounting process answers to it at a path."""

    async def forward(path: str) -> JsonResponse:
        body = await request.body()
        return JsonResponse(await services.accounting.ask(request.method, path, body, actor=actor))

    return forward


Forward = Annotated[Callable[[str], Awaitable[JsonResponse]], Depends(_forwarding)]
_ENDED = Annotated[bool, Query(alias="all", description="Also revoked and expired ones.")]


@router.get("/admin/tenants", summary="Tenants with their limits, and their counts on this host")
async def tenants(services: GatewayServices, actor: CurrentActor) -> JsonResponse:
    """Declared ones and those of the database, with sums over the workers of this host since they started."""
    counts = {entry["name"]: entry for entry in await services.tenants.describe()}
    try:
        answer = await services.accounting.ask("GET", TENANTS, actor=actor)
    except Refused as refused:
        problem = {"code": refused.code, "message": refused.message}
        return JsonResponse({"tenants": list(counts.values()), "problem": problem})
    known: list[dict[str, Any]] = msgspec.json.decode(answer)
    merged = [view | counts.pop(view["name"], {}) for view in known]
    return JsonResponse({"tenants": merged + list(counts.values())})


@router.post("/admin/tenants", summary="Create a tenant in the database")
async def create_tenant(forward: Forward) -> JsonResponse:
    """The body has ``name`` and any of the limits and permissions of a tenant in the deployment file."""
    return await forward(TENANTS)


@router.get("/admin/tenants/{name}", summary="One tenant with its limits")
async def tenant(forward: Forward, name: str) -> JsonResponse:
    """Without its counts."""
    return await forward(item_path(TENANTS, name))


@router.patch("/admin/tenants/{name}", summary="Change limits and permissions of a tenant")
async def update_tenant(forward: Forward, name: str) -> JsonResponse:
    """The members of the body are set, ``null`` removes a limit; ``blocked`` refuses all keys."""
    return await forward(item_path(TENANTS, name))


@router.delete("/admin/tenants/{name}", summary="Delete a tenant, and revoke its keys")
async def delete_tenant(forward: Forward, name: str) -> JsonResponse:
    """The tenant as it was."""
    return await forward(item_path(TENANTS, name))


@router.get("/admin/limits", summary="What is left of the limits in use on this host, of tenants and keys")
async def limits(services: GatewayServices) -> JsonResponse:
    """Those that requests of the last minute named; ``share`` is this host's part of a limit."""
    return JsonResponse({"limits": await services.limits()})


@router.get("/admin/keys", summary="API keys: their tenants, limits and states, never the keys")
async def keys(
    forward: Forward,
    tenant: Annotated[str | None, Query(description="Only this tenant's.")] = None,
    ended: _ENDED = False,
) -> JsonResponse:
    """Declared keys first; they have no limits of their own."""
    return await forward(with_query(KEYS, tenant=tenant, all="true" if ended else None))


@router.post("/admin/keys", summary="Create an API key, which only this answer shows")
async def create_key(forward: Forward) -> JsonResponse:
    """The body has ``tenant``, optionally ``alias``, ``duration`` or ``expires``, and limits of the key."""
    return await forward(KEYS)


@router.get("/admin/keys/{key_id}", summary="One API key, without the key")
async def key(forward: Forward, key_id: str) -> JsonResponse:
    """Its tenant, limits and state."""
    return await forward(item_path(KEYS, key_id))


@router.post("/admin/keys/{key_id}/rotate", summary="Replace an API key by a new one with the same limits")
async def rotate_key(forward: Forward, key_id: str) -> JsonResponse:
    """An optional body has ``grace_s``: for how long the old key stays valid."""
    return await forward(item_path(KEYS, key_id, "rotate"))


@router.delete("/admin/keys/{key_id}", summary="Revoke an API key")
async def revoke_key(forward: Forward, key_id: str) -> JsonResponse:
    """New requests with it are answered 401 on all hosts within a second."""
    return await forward(item_path(KEYS, key_id))


@router.get("/admin/admin-keys", summary="Keys for the admin port, with their roles, never the keys")
async def admin_keys(forward: Forward, ended: _ENDED = False) -> JsonResponse:
    """Oldest first."""
    return await forward(with_query(ADMIN_KEYS, all="true" if ended else None))


@router.post("/admin/admin-keys", summary="Create a key for the admin port, which only this answer shows")
async def create_admin_key(forward: Forward) -> JsonResponse:
    """The body has ``name``, ``role`` (viewer, operator, admin), optionally ``duration`` or ``expires``."""
    return await forward(ADMIN_KEYS)


@router.delete("/admin/admin-keys/{name}", summary="Revoke a key for the admin port, by its name or id")
async def revoke_admin_key(forward: Forward, name: str) -> JsonResponse:
    """It is refused on all hosts within a second."""
    return await forward(item_path(ADMIN_KEYS, name))


@router.get("/admin/audit", summary="Changes: who made which, when, before and after")
async def audit(  # noqa: PLR0917 - FastAPI passes them by name
    forward: Forward,
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
    return await forward(path)
