"""The client port's server: accepts connections, runs the ASGI app in a task per request, times out, drains.

uvicorn, which serves the admin port, would copy a body once per read and await each chunk of a response.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from email.utils import formatdate
from itertools import islice
from typing import Final

import uvloop
from starlette.types import ASGIApp, Scope

from gateway.http.acceptor import Acceptor, PeerConnectionCounts
from gateway.http.asgi_exchange import AsgiExchange
from gateway.http.forwarded import Address, TrustedProxies
from gateway.http.read_turns import request_starts
from gateway.http.server_connection import ServerConnection, ServerContext, ServerTimeouts
from gateway.http.upload_budget import MIN_RATE, UploadBudget
from gateway.protocol.errors import Refused

SWEEP_EVERY_S: Final = 1.0
# Connections in one turn of the event loop: in 5 ms if all of them are refused.
SWEPT_AT_ONCE: Final = 128
FINAL_GRACE_S: Final = 1.0
# For so long a client is observed before it counts as slow: acknowledgements may come in large steps.
OBSERVED_S: Final = 4.0
# For files and the admin port; all other descriptors are shared by clients and their replica connections.
SPARE_DESCRIPTORS: Final = 64


class HttpServer(ServerContext):
    """All connections of the client port.

    ``body_limit``, ``on_refused``, ``refusal_headers`` and ``proxies`` are those of :class:`ServerContext`.
    """

    def __init__(
        self,
        app: ASGIApp,
        body_limit: Callable[[Scope], int],
        on_refused: Callable[[Refused, Scope | None, bytes], None],
        peers: PeerConnectionCounts,
        uploads: UploadBudget,
        *,
        times: ServerTimeouts | None = None,
        max_connections: int | None = None,
        proxies: TrustedProxies | None = None,
        refusal_headers: Callable[[dict[bytes, bytes]], list[tuple[bytes, bytes]]] = lambda received: [],
    ) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, uvloop.Loop):
            raise RuntimeError("the gateway runs only on uvloop")
        self._app = app
        self._loop = loop
        self.body_limit = body_limit
        self.refused = on_refused
        self.refusal_headers = refusal_headers
        self.uploads = uploads
        self.proxies = proxies or TrustedProxies()
        self._peers = peers
        self.times = times = times or ServerTimeouts()
        self.max_connections = max_connections or connections_within_limit()
        self.draining = False
        self.now = loop.time()
        self.date_line = b""
        self._connections: set[ServerConnection] = set()
        self._rejected: set[ServerConnection] = set()
        # Those whose client has much to read: since when it is observed, and what it had taken by then.
        self._observed: dict[ServerConnection, tuple[float, int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = request_starts()
        self._sweep_every_s = min(SWEEP_EVERY_S, min(times) / 4)
        self._listening: Acceptor | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._empty = asyncio.Event()

    async def start(self, sock: socket.socket, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Accept on ``sock``, which is listening already; ``tls`` gives that of the next connection."""
        self._sweep()
        self._listening = Acceptor(self._loop, sock, lambda: ServerConnection(self), self._peers, tls)

    async def drain(self, timeout_s: float) -> None:
        """Stop accepting, give requests in flight ``timeout_s``, then answer them with an error."""
        assert self._listening is not None
        self.draining = True
        await self._listening.close()
        for connection in list(self._connections):
            connection.drain(self._loop.time() + FINAL_GRACE_S)
        # A client that reads its last bytes slowly has the same time.
        await self._all_lost(timeout_s)
        for connection in list(self._connections):
            connection.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=FINAL_GRACE_S)
        for connection in list(self._connections):
            connection.end()
        await self._all_lost(FINAL_GRACE_S)
        if self._timer is not None:
            self._timer.cancel()

    async def _all_lost(self, timeout_s: float) -> None:
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), timeout_s)

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._connections)

    # ServerContext

    def admit(self, connection: ServerConnection) -> bool:
        if len(self._connections) < self.max_connections:
            self._connections.add(connection)
            return True
        self._rejected.add(connection)
        return False

    @property
    def crowded(self) -> bool:
        return len(self._rejected) > SPARE_DESCRIPTORS // 2

    def lost(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._rejected.discard(connection)
        self._observed.pop(connection, None)
        if self._listening is not None:
            self._listening.lost()
        if self.draining and not self._connections:
            self._empty.set()

    def observe(self, connection: ServerConnection) -> None:
        self._observed.setdefault(connection, (self._loop.time(), connection.acknowledged))

    def serve(self, scope: Scope, exchange: AsgiExchange) -> asyncio.Task[None]:
        # The loop's own method makes a name first, and then sets this one.
        task = asyncio.Task(self._run(scope, exchange), loop=self._loop, name="request")
        self._tasks.add(task)
        return task

    def cancel(self, exchange: AsgiExchange) -> None:
        # The task of one that has not begun will not end as others do.
        if (task := exchange.task) is not None:
            task.cancel()
            if not exchange.begun:
                self._tasks.discard(task)
                exchange.body_checked()
                exchange.task = None  # it holds its exception, whose frames hold the exchange

    async def _run(self, scope: Scope, exchange: AsgiExchange) -> None:
        exchange.begun = True
        try:
            address: Address | None = scope["client"]
            client = address[0] if address is not None else ""
            if not self._starts.may_begin(exchange.size, client):
                await self._starts.wait(client)
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            pass  # the client disconnected, or the drain timed out
        finally:
            if exchange.task is not None:
                self._tasks.discard(exchange.task)
            exchange.end()

    def _sweep(self) -> None:
        self.now = self._loop.time()
        self.date_line = b"date: %b\r\n" % formatdate(usegmt=True).encode()
        self._sweep_some(iter([*self._connections, *self._rejected]))
        self.uploads.sweep(self._sweep_every_s)
        self._close_slow_readers()
        self._timer = self._loop.call_later(self._sweep_every_s, self._sweep)

    def _sweep_some(self, connections: Iterator[ServerConnection]) -> None:
        swept = 0
        for connection in islice(connections, SWEPT_AT_ONCE):
            connection.sweep(self.now)
            swept += 1
        if swept == SWEPT_AT_ONCE:
            self._loop.call_soon(self._sweep_some, connections)

    def _close_slow_readers(self) -> None:
        """Beyond the budget of uploads, close connections whose clients read next to nothing lately.

        Those with the most unread first: whole answers would be held for ``stalled_s`` otherwise.
        """
        sizes = {connection: connection.unread for connection in self._observed}
        excess = sum(sizes.values()) - self.uploads.limit
        now = self._loop.time()
        for connection in sorted(sizes, key=sizes.__getitem__, reverse=True) if excess > 0 else sizes:
            if not sizes[connection]:
                del self._observed[connection]
                continue
            since, before = self._observed[connection]
            if now - since < OBSERVED_S:
                continue
            acknowledged = connection.acknowledged
            if excess > 0 and acknowledged - before < MIN_RATE * (now - since):
                excess -= sizes[connection]
                connection.abort()
            self._observed[connection] = now, acknowledged


def connections_within_limit() -> int:
    """The number of client connections within the descriptor limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - SPARE_DESCRIPTORS) // 2)
