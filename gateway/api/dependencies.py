"""Dependencies of endpoints: the worker's components, the caller's tenant and rights, response classes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import Depends, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.types import Receive, Scope, Send

from gateway.api.accounting_proxy import AccountingProxy
from gateway.api.controller_proxy import ControllerProxy
from gateway.api.models_response import ModelsResponse
from gateway.intake.admin_keys import AdminKeys
from gateway.intake.authentication import TenantDirectory
from gateway.intake.principal import Principal
from gateway.protocol.errors import Refused
from gateway.routing.fleet import FleetView
from gateway.routing.model_routers import ModelRouters
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.scrape import Scraper
from gateway.telemetry.structured_log import StructuredLog
from policy.errors import Refusal
from policy.wire.accounting_api import AuditActor

# Where a request's scope has the name of its tenant, for the access log, and who uses the admin port, with a
# function that says whether its token or key is valid still.
TENANT, ACTOR, STILL_ALLOWED = "tidegate.tenant", "tidegate.actor", "tidegate.still_allowed"

# They put the two kinds of keys into the schema; the key itself is checked in one place, by
# `TenantDirectory`.
_BEARER = Depends(HTTPBearer(scheme_name="bearer", auto_error=False))
_KEY = Depends(APIKeyHeader(name="x-api-key", scheme_name="key", auto_error=False))


@dataclass(frozen=True, kw_only=True)
class Services:
    fleet: FleetView
    models: ModelsResponse
    tenants: TenantDirectory
    scraper: Scraper
    routers: ModelRouters
    not_ready: Callable[[], list[str]]
    controller: ControllerProxy
    accounting: AccountingProxy
    admin_keys: AdminKeys
    capture: Callable[[], AsyncGenerator[bytes, None]]
    chat: Callable[[Scope, Receive, Send], Awaitable[None]]
    limits: Callable[[], Awaitable[list[dict[str, Any]]]]
    log: StructuredLog
    access: AccessLog


# Dependencies are coroutines: FastAPI runs other functions in a thread.
async def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


GatewayServices = Annotated[Services, Depends(services_of)]


async def caller(
    request: Request, services: GatewayServices, _bearer: object = _BEARER, _key: object = _KEY
) -> Principal:
    """Who the request's API key belongs to; answers 401 without a valid one, if there are tenants."""
    principal = services.tenants.of(dict(request.scope["headers"]))
    request.scope[TENANT] = principal.account.name
    return principal


Caller = Annotated[Principal, Depends(caller)]


async def admin_caller(principal: Caller) -> Principal:
    """The caller, if its tenant is an admin; answers 403 otherwise."""
    if not principal.account.admin:
        raise Refused(
            Refusal.UNAUTHORIZED, "This needs the key of an admin tenant.", status=403, code="not_admin"
        )
    return principal


AdminCaller = Annotated[Principal, Depends(admin_caller)]


async def actor_of(request: Request) -> AuditActor:
    """Who uses the admin port, in a role that :mod:`gateway.api.admin.authorization` has checked."""
    actor: AuditActor = request.scope[ACTOR]
    return actor


CurrentActor = Annotated[AuditActor, Depends(actor_of)]


async def while_allowed(request: Request, parts: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """The parts of an answer of the admin port that has no end, until the token or key is not valid."""
    allowed: Callable[[], bool] = request.scope[STILL_ALLOWED]
    async with aclosing(parts):
        async for part in parts:
            if not allowed():
                return
            yield part


class JsonResponse(Response):
    """A value that msgspec can encode, or ``bytes`` that are JSON already."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return content if isinstance(content, bytes) else msgspec.json.encode(content)


class NdjsonResponse(StreamingResponse):
    """Lines of JSON, sent as they come."""

    media_type = "application/x-ndjson"
