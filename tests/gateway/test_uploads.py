"""Uploads that are aborted or stall, on raw sockets: what a real worker keeps of them."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psutil
import pytest

from tests.gateway.worker import Stack, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

MIB = 1 << 20
BODY = memoryview(bytes(16 * MIB - 10))
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (16 * MIB)


@asynccontextmanager
async def upload(stack: Stack, size: int) -> AsyncIterator[None]:
    """A connection that sends this much of a body of 16 MiB, unless it is closed before."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock, suppress(ConnectionError):
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, stack.client_socket.getsockname())
            await loop.sock_sendall(sock, HEAD)
            await loop.sock_sendall(sock, BODY[:size])
            yield
        finally:
            loop.remove_writer(sock)


def memory(stack: Stack) -> int:
    return psutil.Process(stack.workers[0].pid).memory_info().rss


async def test_a_thousand_aborted_uploads_leave_no_memory(shared: Stack) -> None:
    await shared.serve("aborts")
    idle = memory(shared)
    rng = random.Random(1)  # noqa: S311

    async def abort(count: int) -> None:
        for _ in range(count):
            async with upload(shared, rng.randrange(600_000)):
                pass

    await asyncio.gather(*(abort(50) for _ in range(20)))
    assert (await shared.chat()).status_code == 200
    process = psutil.Process(shared.workers[0].pid)
    await until(lambda: len(process.net_connections()) < 20, "their connections are closed")
    assert memory(shared) < idle + 64 * MIB


async def test_stalled_uploads_hold_little_memory_and_delay_no_other(shared: Stack) -> None:
    await shared.serve("stalls")
    idle = most = memory(shared)

    async def stall() -> None:
        async with upload(shared, len(BODY)):
            await asyncio.Event().wait()

    stalled = [asyncio.create_task(stall()) for _ in range(60)]
    try:
        for _ in range(3):
            large = {"messages": [{"role": "user", "content": "y" * MIB}]}
            assert (await shared.chat(**large)).status_code == 200
            assert (await shared.chat()).status_code == 200
            most = max(most, memory(shared))
    finally:
        for task in stalled:
            task.cancel()
        await asyncio.wait(stalled)
    assert most < idle + 64 * MIB
