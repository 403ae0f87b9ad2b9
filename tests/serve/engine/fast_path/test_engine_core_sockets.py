"""Messages with an engine core: the sockets are real, the core is this test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.asyncio

from serve.engine.fast_path.engine_core_sockets import exchange_directly


class Core:
    """An engine core's two sockets, and the front's ``client``, as vLLM makes them."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.asyncio.Context()
        output, given = self.context.socket(zmq.PULL), self.context.socket(zmq.ROUTER)
        output.bind(f"ipc://{folder}/out")
        given.bind(f"ipc://{folder}/in")
        self.outputs: Any = zmq.Socket.shadow(self.context.socket(zmq.PUSH))
        self.requests: Any = zmq.Socket.shadow(self.context.socket(zmq.DEALER))
        self.requests.setsockopt(zmq.IDENTITY, b"\0\0")
        self.outputs.connect(f"ipc://{folder}/out")
        self.requests.connect(f"ipc://{folder}/in")
        self.requests.send(b"ready")
        assert zmq.Socket.shadow(given).poll(5000)
        zmq.Socket.shadow(given).recv_multipart()
        self.dead = False
        self.client: Any = SimpleNamespace(
            resources=SimpleNamespace(output_socket=output), input_socket=given, ensure_alive=self._check
        )

    def _check(self) -> None:
        if self.dead:
            raise RuntimeError("dead")

    async def read(self) -> list[bytes]:
        async with asyncio.timeout(10):
            return [
                frame.bytes for frame in await self.client.resources.output_socket.recv_multipart(copy=False)
            ]


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    made = Core(tmp_path)
    yield made
    made.context.destroy(linger=0)


async def test_outputs_come_in_order_whenever_they_were_sent(core: Core) -> None:
    core.outputs.send_multipart([b"before"])
    exchange_directly(core.client)
    assert await core.read() == [b"before"]
    for burst in (1, 2, 300, 1):
        waiting = asyncio.create_task(core.read())
        await asyncio.sleep(0)
        sent = [[b"%d" % n, b"x" * (n * 1000 % 70_001)] for n in range(burst)]
        for message in sent:
            core.outputs.send_multipart(message)
        assert [await waiting, *[await core.read() for _ in sent[1:]]] == sent


async def test_a_reader_that_was_cancelled_loses_no_output(core: Core) -> None:
    exchange_directly(core.client)
    waiting = asyncio.create_task(core.read())
    await asyncio.sleep(0)
    waiting.cancel()
    core.outputs.send_multipart([b"later"])
    assert await core.read() == [b"later"]


async def test_requests_arrive_in_order(core: Core) -> None:
    exchange_directly(core.client)
    for n in range(100):
        await core.client._send_input_message((b"%d" % n, memoryview(b"y" * n * 1000)), b"\0\0")
    for n in range(100):
        assert core.requests.poll(5000)
        assert core.requests.recv_multipart() == [b"%d" % n, b"y" * n * 1000]


async def test_a_dead_core_gets_no_request(core: Core) -> None:
    exchange_directly(core.client)
    core.dead = True
    with pytest.raises(RuntimeError, match="dead"):
        core.client._send_input_message((b"x",), b"\0\0")


async def test_a_closed_socket_is_read_no_more(core: Core) -> None:
    exchange_directly(core.client)
    output = core.client.resources.output_socket
    descriptor = output.getsockopt(zmq.FD)
    output.close(linger=0)
    assert output.closed
    assert not asyncio.get_running_loop().remove_reader(descriptor)
