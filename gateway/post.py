"""A message to the controller over a connection of our own, which is kept for the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.log import Log
from gateway.upstream import Connection, Pool
from store.state import SECRET_HEADER

# An answer that takes longer is no longer waited for.
PATIENCE_S = 2.0


class Post:
    """Messages to one path of the controller; ``address`` says where it is.

    One that does not come through is lost, and said in the log once until one does.
    """

    def __init__(self, address: Callable[[], str], path: str, secret: str, log: Log) -> None:
        self._address = address
        self._path = path
        self._secret = secret
        self._log = log
        self._pool: Pool | None = None
        self._url = ""
        self._lost = False

    async def send(self, body: bytes) -> None:
        """Send ``body``, and wait until it was taken or is lost."""
        status = 0
        try:
            async with asyncio.timeout(PATIENCE_S):
                status = await self._exchange(body)
        except OSError:  # TimeoutError is one
            pass
        lost = status != 200
        if lost and not self._lost:
            self._log.warning("report_lost", path=self._path, status=status)
        self._lost = lost

    def close(self) -> None:
        """Keep no connection."""
        if self._pool is not None:
            self._pool.close()

    async def _exchange(self, body: bytes) -> int:
        """The status of the answer, 0 if there is none; a kept connection may turn out dead, once."""
        pool = self._reach()
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: {pool.host_header.decode()}\r\n"
            f"{SECRET_HEADER}: {self._secret}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        kept = pool.take()
        if kept is not None and (status := await _Answer(kept).to(head, body)):
            return status
        return await _Answer(await pool.connect()).to(head, body)

    def _reach(self) -> Pool:
        """Connections to where the controller is now."""
        url = f"http://{self._address()}"
        if self._pool is None or url != self._url:
            self.close()
            self._pool, self._url = Pool(url, PATIENCE_S, max_idle=1), url
        return self._pool


class _Answer:
    """The sink of one exchange."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._status = 0
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def to(self, head: bytes, body: bytes) -> int:
        """The status of the answer to this request, 0 where the connection died."""
        try:
            self._connection.send(self, head, body)
            return await self._ended
        except asyncio.CancelledError:
            self._connection.abort(self)
            raise

    # the connection's sink

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def on_data(self, data: bytes, *, complete: bool) -> None:
        if complete:
            self._end(self._status)

    def on_chunk(self, data: bytes, framed: bytes) -> None:
        """What it says besides does not matter."""

    def on_lost(self, *, begun: bool) -> None:
        self._end(0)

    def _end(self, status: int) -> None:
        if not self._ended.done():
            self._ended.set_result(status)
