"""What the gateway holds of bodies that another proxy hands over in pieces, and how a stream of it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

pytest.importorskip("grpc")

from gateway.endpoint_picker.ext_proc_messages import ProcessingRequest
from gateway.endpoint_picker.processor import MAX_UNSENT, Processor
from gateway.http.upload_budget import UploadBudget
from gateway.protocol.paths import ProxyRoute
from gateway.request_pipeline import Gateway

PIECE = 1024 * 1024
BUDGET = 8 * PIECE


class Proxied:
    """One request of the proxy's, of which the first piece of the body has come."""

    def __init__(self, uploads: UploadBudget, limit: int = 16 * PIECE) -> None:
        self.answers: list[Any] = []
        self.more: asyncio.Queue[bool] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.gateway = Mock(serve=AsyncMock())
        self.gateway.body_limit.return_value = limit

        async def write(message: Any) -> None:
            self.answers.append(message)

        self.run = asyncio.create_task(Processor(self.gateway, uploads, write).run(self._incoming()))

    async def _incoming(self) -> AsyncIterator[Any]:
        head = ProcessingRequest()
        for name, value in ((b":method", b"POST"), (b":path", b"/v1/chat/completions")):
            head.request_headers.headers.headers.add(key=name, raw_value=value)
        yield head
        last = False
        while not last:
            piece = ProcessingRequest()
            piece.request_body.body = b" " * PIECE
            piece.request_body.end_of_stream = last
            yield piece
            last = await self.more.get()
        piece.request_body.end_of_stream = True
        yield piece
        await self.may_end.wait()

    @property
    def refused(self) -> list[int]:
        return [each.immediate_response.status.code for each in self.answers]


async def test_unfinished_bodies_share_the_budget_of_uploads() -> None:
    uploads = UploadBudget(lambda: (BUDGET, BUDGET))
    all_ = [Proxied(uploads) for _ in range(64)]
    for _ in range(50):
        await asyncio.sleep(0)
    held = [each for each in all_ if not each.refused]
    assert 1 <= len(held) <= BUDGET // PIECE
    assert {code for each in all_ for code in each.refused} == {503}
    for each in held:
        each.more.put_nowait(True)
    await asyncio.wait_for(asyncio.gather(*(each.run for each in held)), 30)
    for each in held:
        each.gateway.serve.assert_called_once()
    for each in all_:
        each.run.cancel()
    await asyncio.gather(*(each.run for each in all_), return_exceptions=True)


@pytest.mark.parametrize(("limit", "refused"), [(2 * PIECE, []), (2 * PIECE - 1, [413])])
async def test_the_last_piece_of_a_body_counts(limit: int, refused: list[int]) -> None:
    proxied = Proxied(UploadBudget(lambda: (BUDGET, BUDGET)), limit)
    proxied.more.put_nowait(True)
    await asyncio.wait_for(proxied.run, 30)
    assert proxied.refused == refused
    assert proxied.gateway.serve.call_count == (0 if refused else 1)


async def test_a_complete_body_counts_until_it_is_checked() -> None:
    """It counted until it was complete, and others went on."""
    uploads = UploadBudget(lambda: (BUDGET, BUDGET))
    proxied = Proxied(uploads)
    proxied.may_end.clear()

    async def serve(*_: Any) -> None:
        await proxied.may_end.wait()

    proxied.gateway.serve.side_effect = serve
    for last in (False, False, False, True):
        proxied.more.put_nowait(last)
    for _ in range(50):
        await asyncio.sleep(0)
    proxied.gateway.serve.assert_called_once()
    receiver = Mock()
    uploads.hold(uploads.begin(receiver, ("192.0.2.1", 1)), 1, PIECE)
    receiver.hold_back.assert_called_once()
    proxied.may_end.set()
    await asyncio.wait_for(proxied.run, 30)
    receiver.read_on.assert_called_once()


class OneRequest:
    """A gateway that serves one request with ``work``, and what the proxy is sent."""

    def __init__(self, work: ASGIApp, limit: int = PIECE) -> None:
        self._work = work
        self._limit = limit

    def body_limit(self, scope: Scope) -> int:
        return self._limit

    async def client(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._work(scope, receive, send)

    async def serve(self, route: ProxyRoute, scope: Scope, receive: Receive, send: Send) -> None:
        await self._work(scope, receive, send)

    def process(
        self, messages: asyncio.Queue[Any], write: Callable[[Any], Awaitable[None]]
    ) -> asyncio.Task[None]:
        """The task of a stream of these messages, which ends with ``None``."""

        async def incoming() -> AsyncIterator[Any]:
            while (message := await messages.get()) is not None:
                yield message

        uploads = UploadBudget(lambda: (BUDGET, BUDGET))
        gateway = cast("Gateway", self)
        return asyncio.create_task(Processor(gateway, uploads, write).run(incoming()))


def head(method: bytes, path: bytes) -> Any:
    """The headers of a request without a body."""
    message = ProcessingRequest()
    for name, value in ((b":method", method), (b":path", path)):
        message.request_headers.headers.headers.add(key=name, raw_value=value)
    message.request_headers.end_of_stream = True
    return message


class Sink:
    """Knows whether the head of the answer has come."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def on_head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.begun.set()

    def on_data(self, data: bytes, *, complete: bool) -> None: ...


async def test_a_client_that_leaves_a_backed_up_stream_ends_its_request() -> None:
    """The write that failed first was taken for the end of the answer: the request was never cancelled."""
    backed_up, gone, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        connection, sink = scope["tidegate.proxied"], Sink()
        connection.to("http://127.0.0.1:9")
        messages.put_nowait(answer)
        connection.send(sink, b"POST /v1/completions HTTP/1.1\r\n\r\n", b"{}")
        await sink.begun.wait()
        send({"type": "http.response.start", "status": 200, "headers": []})
        send({"type": "http.response.body", "body": bytes(2 * MAX_UNSENT), "more_body": True})
        connection.pause(sink)
        backed_up.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def write(message: Any) -> None:
        if message.WhichOneof("kind") == "response_body":
            await gone.wait()
            raise ConnectionError

    answer = ProcessingRequest()
    answer.response_headers.headers.headers.add(key=b":status", raw_value=b"200")
    messages = asyncio.Queue[Any]()
    messages.put_nowait(head(b"POST", b"/v1/completions"))
    run = OneRequest(work).process(messages, write)
    await asyncio.wait_for(backed_up.wait(), 30)
    gone.set()
    for _ in range(5):
        await asyncio.sleep(0)
    run.cancel()
    await asyncio.wait([run], timeout=5)
    assert (ended.is_set(), run.done()) == (True, True)


async def test_an_answer_of_the_gateways_own_in_several_parts_is_sent_whole() -> None:
    async def work(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "http.request"
        # What sends a file waits for a client that leaves, while it reads.
        leaves = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        left.append(leaves.done())
        leaves.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part, more in ((b"a", True), (b"b", True), (b"c", False)):
            await send({"type": "http.response.body", "body": part, "more_body": more})

    answers: list[Any] = []
    left: list[bool] = []

    async def write(message: Any) -> None:
        answers.append(message)
        messages.put_nowait(None)

    messages = asyncio.Queue[Any]()
    messages.put_nowait(head(b"GET", b"/docs/file.js"))
    await asyncio.wait_for(OneRequest(work, 0).process(messages, write), 30)
    assert [each.immediate_response.body for each in answers] == [b"abc"]
    assert left == [False]
