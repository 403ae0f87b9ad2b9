"""A client of the client port in memory: the server processes what it sends when it is sent."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from gateway.http.server import HttpServer
from gateway.http.server_connection import ServerConnection


class MemoryClient:
    """The transport of a server's connection, whose client reads at once what is sent to it.

    ``received``: all of that; ``closed``: the server closed the connection. ``sock`` is the server's end.
    """

    def __init__(self, server: HttpServer, sock: socket.socket | None = None) -> None:
        self.received = b""
        self.closed = False
        self._sock = sock
        self.connection = ServerConnection(server)
        self.connection.connection_made(self)  # type: ignore[arg-type]

    async def send(self, data: bytes) -> None:
        at = 0
        while at < len(data) and not self.closed:
            buffer = self.connection.get_buffer(-1)
            size = min(len(buffer), len(data) - at)
            buffer[:size] = data[at : at + size]
            self.connection.buffer_updated(size)
            at += size
            await asyncio.sleep(0)

    # asyncio.Transport

    def write(self, data: bytes) -> None:
        self.received += b"" if self.closed else bytes(data)

    def writelines(self, parts: Any) -> None:
        for part in parts:
            self.write(part)

    def close(self) -> None:
        self.closed = True

    abort = close

    def write_eof(self) -> None:
        """No more is sent."""

    def get_extra_info(self, name: str) -> Any:
        return {"peername": ("127.0.0.1", 1), "socket": self._sock}.get(name)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """All is read."""

    resume_reading = pause_reading
