"""A double of vLLM's publisher of KV events: one socket publishes numbered batches, another repeats them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


def stored(
    hashes: list[Any], tokens: list[int], size: int, parent: Any = None, **more: Any
) -> dict[str, Any]:
    usual = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return {**usual, "block_size": size, "lora_id": None, "medium": "GPU", "lora_name": None, **more}


def removed(*hashes: Any, medium: str | None = "GPU") -> Any:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.0, events])


class Publisher:
    """Binds both sockets on loopback; ``start`` is a new process, which counts from 0."""

    def __init__(self, buffer_steps: int = 1000) -> None:
        self.port = self.replay_port = 0
        self._old: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._number = 0
        self._count = 0

    def start(self) -> None:
        context = zmq.asyncio.Context.instance()
        self.pub, self._router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.port = _bound(self.pub, self.port)
        self.replay_port = _bound(self._router, self.replay_port)
        self._old.clear()
        self._number = 0
        self._task = asyncio.create_task(self._repeat())

    async def publish(self, *events: Any, lost: bool = False) -> None:
        """One batch; a ``lost`` one is published to nobody, and can be asked for."""
        self._count += 1
        await self.send(msgspec.msgpack.encode([float(self._count), events]), lost=lost)

    async def send(self, payload: bytes, *, lost: bool = False) -> None:
        if not lost:
            await self.pub.send_multipart([b"", self._number.to_bytes(8), payload])
        self._old.append((self._number, payload))
        self._number += 1

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self.pub.close(0)
        self._router.close(0)

    async def _repeat(self) -> None:
        while True:
            who, _, since = await self._router.recv_multipart()
            for number, payload in tuple(self._old):
                if number >= int.from_bytes(since):
                    await self._router.send_multipart([who, b"", b"", number.to_bytes(8), payload])
            await self._router.send_multipart([who, b"", b"", END, b""])


@contextlib.asynccontextmanager
async def publishing(buffer_steps: int = 1000) -> AsyncIterator[Publisher]:
    publisher = Publisher(buffer_steps)
    publisher.start()
    try:
        yield publisher
    finally:
        await publisher.stop()


def _bound(socket: zmq.asyncio.Socket, port: int) -> int:
    socket.setsockopt(zmq.LINGER, 0)
    if not port:
        return socket.bind_to_random_port("tcp://127.0.0.1")
    while True:
        try:
            socket.bind(f"tcp://127.0.0.1:{port}")
        except zmq.ZMQError:  # the one before is closed by another thread
            time.sleep(0.01)
        else:
            return port
