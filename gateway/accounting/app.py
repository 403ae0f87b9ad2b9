"""The accounting process's HTTP API on its Unix socket, which only this user can open."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.accounting.database_access import DatabaseAccess
from policy.errors import TidegateError
from policy.wire.controller import problem_of


def build_app(database: DatabaseAccess) -> Starlette:
    """The app over ``database``."""

    async def ready(_request: Request) -> Response:
        """Whether the database answers."""
        try:
            await asyncio.to_thread(database.get)
        except TidegateError as error:
            return json_answer({"error": problem_of(error)}, 503)
        return json_answer({"ready": True})

    return Starlette(routes=[Route("/readyz", ready)])


def json_answer(value: object, status: int = 200) -> Response:
    """``value`` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")
