"""The accounting process's HTTP API on its Unix socket, which only this user can open.

The command line also calls it in its own process, where no deployment runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gateway.accounting.access_transaction import AccessDatabase
from gateway.accounting.key_changes import AdminKeyChanges, KeyChanges
from gateway.accounting.ledger_reports import query_of, rows
from gateway.accounting.tenant_changes import TenantChanges
from policy.config.convert import convert, prepare_decoders, require
from policy.errors import TidegateError
from policy.wire.accounting_api import (
    ADMIN_KEYS,
    AUDIT,
    KEYS,
    READY,
    TENANTS,
    USAGE,
    AuditActor,
    AuditQuery,
    CreateAdminKey,
    CreateKey,
    CreateTenant,
    RotateKey,
    actor_in,
)
from policy.wire.controller import answer_of, problem_of
from store.os_process import local_user
from store.tenancy import audit

Handler = Callable[[Request], Awaitable[Response]]
T = TypeVar("T")

_MAX_AUDIT = 10_000
# Each request is decoded in a thread.
prepare_decoders(AuditQuery, CreateAdminKey, CreateKey, CreateTenant, RotateKey)


def build_app(access: AccessDatabase, more: Sequence[BaseRoute] = ()) -> Starlette:
    """The app over the database, with ``more`` routes."""
    tenants, keys, admins = TenantChanges(access), KeyChanges(access), AdminKeyChanges(access)

    def ready(_request: Request, _body: bytes) -> object:
        with access.reading():
            return {"ready": True}

    def read_audit(request: Request, _body: bytes) -> object:
        query = msgspec.convert(dict(request.query_params), AuditQuery, strict=False)
        require(1 <= query.last <= _MAX_AUDIT, "last", query.last, f"1 to {_MAX_AUDIT}")
        with access.reading() as connection:
            return audit.read(connection, query)

    def read_usage(request: Request, _body: bytes) -> object:
        query = query_of(dict(request.query_params))
        with access.reading() as connection:
            return rows(connection, query)

    def ended(request: Request) -> bool:
        return request.query_params.get("all") == "true"

    return Starlette(
        routes=[
            route("GET", READY, ready),
            route("GET", AUDIT, read_audit),
            route("GET", USAGE, read_usage),
            route("GET", TENANTS, lambda _request, _body: tenants.every()),
            route("POST", TENANTS, lambda r, b: tenants.create(_decoded(b, CreateTenant), actor_of(r))),
            route("GET", f"{TENANTS}/{{name}}", lambda r, _body: tenants.one(_name(r))),
            route(
                "PATCH",
                f"{TENANTS}/{{name}}",
                lambda r, b: tenants.update(_name(r), _decoded(b, dict[str, Any]), actor_of(r)),
            ),
            route("DELETE", f"{TENANTS}/{{name}}", lambda r, _body: tenants.delete(_name(r), actor_of(r))),
            route("GET", KEYS, lambda r, _body: keys.every(r.query_params.get("tenant"), ended=ended(r))),
            route("POST", KEYS, lambda r, b: keys.create(_decoded(b, CreateKey), actor_of(r))),
            route("GET", f"{KEYS}/{{name}}", lambda r, _body: keys.one(_name(r))),
            route(
                "POST",
                f"{KEYS}/{{name}}/rotate",
                lambda r, b: keys.rotate(_name(r), _decoded(b or b"{}", RotateKey).grace_s, actor_of(r)),
            ),
            route("DELETE", f"{KEYS}/{{name}}", lambda r, _body: keys.revoke(_name(r), actor_of(r))),
            route("GET", ADMIN_KEYS, lambda r, _body: admins.every(ended=ended(r))),
            route("POST", ADMIN_KEYS, lambda r, b: admins.create(_decoded(b, CreateAdminKey), actor_of(r))),
            route("DELETE", f"{ADMIN_KEYS}/{{name}}", lambda r, _body: admins.revoke(_name(r), actor_of(r))),
            *more,
        ]
    )


def route(
    method: str, path: str, work: Callable[[Request, bytes], object], thread: Executor | None = None
) -> Route:
    """A route whose ``work`` returns what is answered as JSON; refusals have their status.

    It runs in ``thread``, or else in one of those that may all wait for the database.
    """

    async def endpoint(request: Request) -> Response:
        body = await request.body()
        try:
            loop = asyncio.get_running_loop()
            answer, status = await loop.run_in_executor(thread, work, request, body), 200
        except TidegateError as error:
            answer, status = {"error": problem_of(error)}, answer_of(type(error).__name__).admin_status
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            problem = {"type": "BadRequest", "message": str(error)}
            answer, status = {"error": problem}, 400
        return Response(msgspec.json.encode(answer), status, media_type="application/json")

    return Route(path, endpoint, methods=[method])


def actor_of(request: Request) -> AuditActor:
    """Who makes the change: who the caller says, which may open the socket, or else its user."""
    return actor_in(request.headers, local_user())


def _name(request: Request) -> str:
    name: str = request.path_params["name"]
    return name


def _decoded(body: bytes, kind: type[T]) -> T:
    return convert(msgspec.json.decode(body), kind, "")
