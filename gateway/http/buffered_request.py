"""Requests whose response is buffered, over the client of :mod:`gateway.http.http1_client`."""

from __future__ import annotations

import asyncio

from gateway.http.http1_client import ConnectionPool, Http1ClientConnection


class _Receiver:
    """Collects one answer of at most ``most`` bytes."""

    def __init__(self, most: int) -> None:
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.status = 0
        self._most = most
        self._body = bytearray()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.status = status

    def on_data(self, data: bytes, *, complete: bool) -> None:
        self._body += data
        if self.done.done():
            return
        if len(self._body) > self._most:
            self.done.set_exception(ValueError("the answer is too large"))
        elif complete:
            self.done.set_result(bytes(self._body))

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        self.on_data(data, complete=False)

    def on_lost(self, *, stale: bool) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError("the connection was lost"))


async def post(
    pool: ConnectionPool, path: bytes, headers: bytes, body: bytes, *, within_s: float, max_bytes: int
) -> tuple[int, bytes]:
    """Status and body of the answer; raises ``OSError``, which includes timeouts, or ``ValueError``.

    The latter if it has more than ``max_bytes``. ``headers`` are lines, each with its end; the length is
    added.
    """
    head = b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (path, headers, len(body))
    receiver = _Receiver(max_bytes)
    connection: Http1ClientConnection | None = None
    try:
        async with asyncio.timeout(within_s):
            connection = pool.take() or await pool.connect()
            connection.send(receiver, head, body)
            answer = await receiver.done
    finally:
        if connection is not None and not (receiver.done.done() and receiver.done.exception() is None):
            connection.abort(receiver)
    return receiver.status, answer
