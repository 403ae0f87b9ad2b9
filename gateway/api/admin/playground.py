"""The page's playground: a chat completion through this worker's pipeline, with its routing decision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.security import HTTPBearer
from starlette.types import Message, Receive, Scope, Send

from gateway.api.dependencies import GatewayServices
from gateway.http.asgi_exchange import SENT
from policy.wire.headers import EXPLAIN_HEADER

router = APIRouter(dependencies=[Depends(HTTPBearer(scheme_name="token", auto_error=False))])

_HEADERS = [(b"content-type", b"application/json"), (EXPLAIN_HEADER.encode(), b"1")]


@router.post("/admin/playground", summary="A chat completion of any model or adapter, as an operator")
async def playground(services: GatewayServices, request: Request) -> Response:
    """The body and the answer are those of `/v1/chat/completions`; x-tidegate-explain has the route."""
    return _Piped(services.chat, await request.body())


class _Piped(Response):
    """The answer of the pipeline to ``body``; it is cancelled when the client leaves.

    The pipeline's ``send`` returns at once: what it sends waits here for a slow client.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], body: bytes) -> None:
        super().__init__()
        self._app = app
        self._asked = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent: asyncio.Queue[Message] = asyncio.Queue()

        async def asked() -> Message:
            return {"type": "http.request", "body": self._asked, "more_body": False}

        def answer(message: Message) -> Awaitable[None]:
            sent.put_nowait(message)
            return SENT

        tasks: set[asyncio.Future[None]] = {
            asyncio.ensure_future(self._app({**scope, "headers": _HEADERS}, asked, answer)),
            asyncio.ensure_future(_left(receive)),
        }
        try:
            await _pass_on(sent, send, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def _pass_on(sent: asyncio.Queue[Message], send: Send, tasks: set[asyncio.Future[None]]) -> None:
    """Send all messages of an answer, until it is complete or one of ``tasks`` ends."""
    more = True
    while more:
        coming = asyncio.ensure_future(sent.get())
        either: set[asyncio.Future[Any]] = {coming, *tasks}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not coming.done():
            coming.cancel()
            return
        message = coming.result()
        if message["type"] == "http.response.start":  # the port adds an id of its own
            headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            message = {**message, "headers": headers}
        else:
            more = message.get("more_body", False)
        await send(message)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
