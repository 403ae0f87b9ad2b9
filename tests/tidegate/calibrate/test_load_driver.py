"""Closed-loop clients against a server that answers a limited number of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from policy.errors import PreconditionFailed
from sim.calibration.experiment_design import CalibrationPoint
from tidegate.calibrate import load_driver
from tidegate.calibrate.load_driver import CalibrationLoad
from tidegate.replay.endpoint_api import RequestFormat
from tidegate.replay.http_client import ReplayConnectionPool
from tidegate.replay.prompts import PromptGenerator

EVENTS = (
    b'data: {"choices": [{"finish_reason": null}]}\n\n'
    b'data: {"choices": [{"finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 2}}\n\n'
    b"data: [DONE]\n\n"
)


@asynccontextmanager
async def endpoint(
    status: bytes, body: bytes, most: int, over: int
) -> AsyncIterator[tuple[ReplayConnectionPool, list[bytes], asyncio.Event]]:
    """A server that answers ``most`` requests; yields its requests, and an event after ``over`` of them."""
    heads: list[bytes] = []
    enough = asyncio.Event()

    served: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                heads.append(head + await reader.readexactly(length))
                if len(heads) == over:
                    enough.set()
                if len(heads) <= most:
                    writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    pool = ReplayConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield pool, heads, enough
    finally:
        pool.close()
        server.close()
        await asyncio.gather(*served)


async def test_lengths_are_those_of_the_endpoint_and_open_requests_are_cancelled() -> None:
    async with endpoint(b"200 OK", EVENTS, most=5, over=7) as (pool, requests, enough):
        driven = await CalibrationLoad(pool, RequestFormat("m"), PromptGenerator(0)).drive(
            CalibrationPoint(2, 16, 4), 1, enough.wait()
        )
    assert (driven.point.input_tokens, driven.point.output_tokens) == (21, 2)
    assert len(driven.latencies) == 5
    # Each of the two clients has one more request, without an answer.
    assert len(set(requests)) == len(requests) == 7
    assert driven.refused == ""


async def test_each_replica_has_its_own_clients() -> None:
    async with endpoint(b"200 OK", EVENTS, most=0, over=6) as (pool, requests, enough):
        await CalibrationLoad(pool, RequestFormat("m"), PromptGenerator(0)).drive(
            CalibrationPoint(2, 16, 4), 3, enough.wait()
        )
    assert len(requests) == 6


async def test_an_endpoint_that_refuses_everything_is_no_load_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_driver, "REFUSED_S", 0.0)
    busy = b'{"error": {"message": "too much"}}'
    async with endpoint(b"503 Service Unavailable", busy, most=9, over=2) as (pool, _, enough):
        with pytest.raises(PreconditionFailed, match="every request failed: too much"):
            await CalibrationLoad(pool, RequestFormat("m"), PromptGenerator(0)).drive(
                CalibrationPoint(1, 16, 4), 1, enough.wait()
            )
