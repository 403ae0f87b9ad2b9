"""The adapter routes of the controller's HTTP API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from policy.errors import AdapterUnknown
from policy.wire.adapter_catalog import DIGEST
from policy.wire.controller import (
    ADAPTERS,
    ADAPTERS_STREAM,
    AddAdapterLine,
    AddAdapterRequest,
    RollbackRequest,
)
from serve.adapters.add_job_state import AddAdapterJob
from serve.adapters.controller import AdapterController
from serve.async_waiting import wait_at_most
from serve.change_audit import ChangeAudit
from serve.json_responses import json_answer, refusing
from serve.state.versioned_watch import HEARTBEAT_S, Revision
from store.adapters.fetch_context import redacted

# How long an answer waits until every connected gateway was sent the change.
DELIVERY_TIMEOUT_S = 1.0
# Minimum interval between two lines of progress.
PROGRESS_S = 0.1
NDJSON = "application/x-ndjson"


def routes(adapters: AdapterController, audit: ChangeAudit) -> list[Route]:
    """The routes. A model's name may contain slashes."""
    library = adapters.library
    revision = library.catalog.revision

    def served(key: tuple[str, str]) -> dict[str, Any] | None:
        """What a name serves, for the audit trail."""
        alias = library.catalog.get(key)
        if alias is None:
            return None
        return {"split": alias.shares, "tenants": alias.tenants}

    async def record(
        request: Request, action: str, key: tuple[str, str], before: object, after: object
    ) -> None:
        await audit.record(request.headers, f"adapter.{action}", ":".join(key), before=before, after=after)

    async def status(request: Request) -> Response:
        await library.read()
        return json_answer(adapters.status())

    async def add(request: Request) -> Response:
        wanted = msgspec.json.decode(await request.body(), type=AddAdapterRequest)
        adding = library.add(wanted)
        asked = structs.asdict(wanted) | {"source": redacted(wanted.source), "model": adding.key[0]}
        await record(request, "add", adding.key, served(adding.key), asked)
        return StreamingResponse(progress(adding, revision), media_type=NDJSON)

    async def remove(request: Request) -> Response:
        model, name = key = _key(request)
        before = served(key)
        await adapters.declared.remove(key)
        await record(request, "remove", key, before, None)
        await revision.delivered(DELIVERY_TIMEOUT_S)
        return json_answer({"model": model, "name": name})

    async def split(request: Request) -> Response:
        weights = msgspec.json.decode(await request.body(), type=dict[str, float])
        key = _key(request)
        before = served(key)
        alias = await library.split(key, weights)
        await record(request, "split", key, before, served(key))
        await revision.delivered(DELIVERY_TIMEOUT_S)
        return json_answer(alias)

    async def rollback(request: Request) -> Response:
        wanted = msgspec.json.decode(await request.body() or b"{}", type=RollbackRequest)
        key = _key(request)
        before = served(key)
        alias = await library.rollback(key, wanted.to)
        await record(request, "rollback", key, before, served(key))
        await revision.delivered(DELIVERY_TIMEOUT_S)
        return json_answer(alias)

    async def stream(request: Request) -> Response:
        return StreamingResponse(revision.stream(library.line), media_type=NDJSON)

    async def blob(request: Request) -> Response:
        digest = request.path_params["digest"]
        if DIGEST.fullmatch(digest) is None or (pieces := await library.tar(digest)) is None:
            raise AdapterUnknown(f"there is no adapter with the digest {digest[:64]!r}")
        return StreamingResponse(pieces, media_type="application/x-tar")

    path = f"{ADAPTERS}/{{model:path}}/{{name}}"
    return [
        Route(ADAPTERS, refusing(status)),
        Route(ADAPTERS, refusing(add), methods=["POST"]),
        Route(ADAPTERS_STREAM, stream),
        Route(f"{ADAPTERS}/blobs/{{digest}}", refusing(blob)),
        Route(f"{path}/split", refusing(split), methods=["POST"]),
        Route(f"{path}/rollback", refusing(rollback), methods=["POST"]),
        Route(path, refusing(remove), methods=["DELETE"]),
    ]


def _key(request: Request) -> tuple[str, str]:
    return request.path_params["model"], request.path_params["name"]


async def progress(adding: AddAdapterJob, revision: Revision) -> AsyncIterator[bytes]:
    """The progress of ``adding``, repeated once a second without a change, and its outcome.

    The outcome follows once the gateways were sent the catalog, so that the name can be used at once.
    """
    loop = asyncio.get_running_loop()
    sent, until = AddAdapterLine(), 0.0
    while not await wait_at_most(adding.done, PROGRESS_S):
        if adding.line != sent or loop.time() >= until:
            sent, until = adding.line, loop.time() + HEARTBEAT_S
            yield msgspec.json.encode(sent) + b"\n"
    await revision.delivered(DELIVERY_TIMEOUT_S)
    yield msgspec.json.encode(adding.line) + b"\n"
