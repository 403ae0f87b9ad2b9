"""What the gateway holds of bodies that another proxy hands over in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

pytest.importorskip("grpc")

from gateway.endpoint_picker.ext_proc_messages import ProcessingRequest
from gateway.endpoint_picker.processor import Processor
from gateway.http.upload_budget import UploadBudget

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
