"""Usage and cost of tenants: sums of the ledger, answered by the accounting process of this host."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.security import HTTPBearer

from gateway.api.dependencies import CurrentActor, GatewayServices, JsonResponse
from policy.wire.accounting_api import USAGE
from policy.wire.controller import with_query

router = APIRouter(dependencies=[Depends(HTTPBearer(scheme_name="token", auto_error=False))])


@router.get("/admin/usage", summary="Usage and cost by tenant, key, model, adapter or day")
async def usage(  # noqa: PLR0917 - the query's parameters
    services: GatewayServices,
    actor: CurrentActor,
    by: Annotated[
        str, Query(description="Some of day, tenant, key, model, adapter, with commas.")
    ] = "tenant",
    tenant: Annotated[str | None, Query(description="Only this tenant's.")] = None,
    since: Annotated[str | None, Query(description="The first day, in UTC: 2026-01-31.")] = None,
    until: Annotated[str | None, Query(description="The last day, in UTC.")] = None,
) -> JsonResponse:
    """A row for each value of what it is summed by. A request is there half a second after it ended."""
    path = with_query(USAGE, by=by, tenant=tenant, since=since, until=until)
    return JsonResponse(await services.accounting.ask("GET", path, actor=actor))
