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
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


@asynccontextmanager
async def upload(
    stack: Stack, size: int, length: int = 16 * MIB, pauses: tuple[float, ...] = ()
) -> AsyncIterator[None]:
    """A connection that sends ``size`` bytes of a body, in pieces between ``pauses``, unless it is closed."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock, suppress(ConnectionError):
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, stack.client_socket.getsockname())
            await loop.sock_sendall(sock, HEAD % length)
            piece = size // (len(pauses) + 1)
            for pause_s in pauses:
                await loop.sock_sendall(sock, BODY[:piece])
                await asyncio.sleep(pause_s)
            await loop.sock_sendall(sock, BODY[: size - piece * len(pauses)])
            yield
        finally:
            loop.remove_writer(sock)


def memory(stack: Stack) -> int:
    return psutil.Process(stack.workers[0].pid).memory_info().rss


async def abort_a_thousand(stack: Stack, rng: random.Random) -> None:
    async def abort(count: int) -> None:
        for _ in range(count):
            async with upload(stack, rng.randrange(600_000)):
                pass

    await asyncio.gather(*(abort(50) for _ in range(20)))
    assert (await stack.chat()).status_code == 200
    process = psutil.Process(stack.workers[0].pid)
    await until(lambda: len(process.net_connections()) < 20, "their connections are closed")


async def test_a_thousand_aborted_uploads_leave_no_memory(shared: Stack) -> None:
    await shared.serve("aborts")
    idle = memory(shared)
    await abort_a_thousand(shared, random.Random(1))  # noqa: S311
    assert memory(shared) < idle + 64 * MIB


@pytest.mark.long
async def test_aborted_uploads_after_slow_ones_take_no_more_memory(shared: Stack) -> None:
    await shared.serve("slow")
    idle = most = memory(shared)
    rng = random.Random(2)  # noqa: S311

    async def send_slowly() -> None:
        length = rng.randrange(1_000, MIB)
        size = length if rng.random() < 0.5 else rng.randrange(length)
        async with upload(shared, size, length, tuple(rng.uniform(0, 0.6) for _ in range(8))):
            pass

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, memory(shared))
            await asyncio.sleep(0.01)

    for _ in range(4):
        await asyncio.gather(*(send_slowly() for _ in range(1000)))
        watching = asyncio.create_task(watch())
        await abort_a_thousand(shared, rng)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching
    assert most < idle + 64 * MIB


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


async def test_complete_bodies_wait_to_be_checked_in_little_memory(shared: Stack) -> None:
    """They were in no budget: 30 of them took 480 MiB, whatever model they named."""
    await shared.serve("complete")
    text = b'{"model":"nobody","messages":[{"role":"user","content":"%b"}]}' % (b"y" * (16 * MIB - 100))
    idle = most = memory(shared)
    loop = asyncio.get_running_loop()

    async def ask() -> bytes:
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, shared.client_socket.getsockname())
            await loop.sock_sendall(sock, HEAD % len(text) + text)
            return (await loop.sock_recv(sock, 4096)).partition(b"\r\n")[0]

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, memory(shared))
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    answers = await asyncio.gather(*(ask() for _ in range(30)))
    watching.cancel()
    # A client that this machine gives no time for a second is refused as slow.
    assert {*answers} - {b"HTTP/1.1 408 Request Timeout"} == {b"HTTP/1.1 404 Not Found"}
    # Half of the budget, and those that are complete as it is reached.
    assert most < idle + 96 * MIB
