"""A TCP proxy in user space with latency, jitter, slicing and partitions."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket


class Proxy:
    """Stands in front of ``target``, a port of loopback; every property may change while it runs."""

    def __init__(self, target: int, *, seed: int = 0) -> None:
        self._target = target
        self._random = random.Random(seed)  # noqa: S311 - jitter
        self._server: asyncio.Server | None = None
        self._wall: list[socket.socket] = []
        self._whole = asyncio.Event()
        self._whole.set()
        self.links: dict[asyncio.Task[None], int] = {}
        self._ends: list[asyncio.StreamWriter] = []
        self.port = 0
        self.latency_s = 0.0
        self.jitter_s = 0.0
        self.slice_bytes: int | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._link, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self._unwall()
        if self._server is not None:
            self._server.close()
        for link in list(self.links):
            link.cancel()
        await asyncio.gather(*self.links, return_exceptions=True)
        # Not just closed: that would wait for a peer that reads no more, beyond the end of the loop.
        for end in self._ends:
            end.transport.abort()
        await asyncio.gather(*(end.wait_closed() for end in self._ends), return_exceptions=True)
        self._ends = []

    def partition(self) -> None:
        """Drop all data from now on without a RST; connections are never accepted.

        A full accept queue makes the kernel drop what asks for a connection, as a lost host does.
        """
        assert self._server is not None
        self._server.close()
        self._server = None
        self._whole.clear()
        wall = socket.socket()
        wall.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        wall.bind(("127.0.0.1", self.port))
        wall.listen(0)
        self._wall = [wall]
        for _ in range(2):
            filler = socket.socket()
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(("127.0.0.1", self.port))
            self._wall.append(filler)

    async def heal(self) -> None:
        self._unwall()
        await self.start()
        self._whole.set()

    def _unwall(self) -> None:
        for sock in self._wall:
            sock.close()
        self._wall = []

    async def _link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.links[task] = writer.get_extra_info("peername")[1]
        self._ends.append(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._ends.append(back)
            try:
                pumps = [asyncio.create_task(self._pump(*ends)) for ends in ((reader, back), (there, writer))]
                # The end of one direction is the end of both, as it is of an HTTP connection.
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                back.close()
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            del self.links[task]

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            due = 0.0
            data = b"."
            while data:
                try:
                    data = await reader.read(64 * 1024)
                except ConnectionError:  # which each further read would raise at once
                    data = b""
                delay = self.latency_s + self.jitter_s * self._random.random()
                due = max(due, loop.time() + delay)
                pieces.put_nowait((due, data))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, data = await pieces.get()
                await asyncio.sleep(due - loop.time())
                await self._whole.wait()
                if not data:
                    return
                await self._write(writer, data)
        finally:
            reading.cancel()

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        size = self.slice_bytes or len(data)
        for at in range(0, len(data), size):
            part = data[at : at + size]
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
