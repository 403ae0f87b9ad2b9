"""Accepts connections, a few in a turn, from a listening socket that several workers share.

uvloop's own server accepts all that wait, and closes for good after most failures of accept().

The kernel wakes every worker, and the quickest would take most connections. A worker that has more than
another leaves a waiting connection to that one for a few milliseconds, and takes it if it still waits: a
worker that is stopped or busy delays it and cannot block it. docs/adr/0009-workers-inherit-one-socket.md says
why this and not SO_REUSEPORT, with measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol

from gateway.http.reserve_descriptor import ReserveDescriptor

# Pause when no connection can be accepted even to close it; without it the loop would spin.
REST_S: Final = 0.05
# A worker leaves the next connection to another that has at least this many fewer, plus one.
MARGIN: Final = 1
# For how long, unless the other takes it: then workers that share a burst go on at once.
LEAVE_S: Final = 0.01
CHECK_S: Final = 0.001
# After waiting in vain a worker takes 1 connection, then 2, 4, ... up to this many, before it waits again: 40
# that come at once are delayed by 60 ms when another worker is stopped, and shared when it is slow to wake.
MOST_TAKEN: Final = 256
# In one turn of the event loop, in a millisecond: a turn in which uploads are read takes several, and of 300
# clients that leave while they send the last one was accepted after a second of them, with one in each turn.
MOST_IN_A_TURN: Final = 8
# For a TLS handshake. With more than MOST_HANDSHAKES at once the oldest is given up: it had longest.
HANDSHAKE_S: Final = 10.0
MOST_HANDSHAKES: Final = 1024
# For those that have begun when accepting ends.
LAST_HANDSHAKES_S: Final = 1.0
# Until TLS is ended in order; connections that make no progress are closed by the server's timeouts before.
TLS_SHUTDOWN_S: Final = 600.0
# The machine is out of some resource: waiting clients are closed, and those being served go on.
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class PeerConnectionCounts(Protocol):
    """The other workers that accept on the socket; :mod:`gateway.routing.shared_counters` implements it."""

    def report_connections(self, count: int) -> None:
        """Report that this worker accepts, and has ``count`` connections; -1: it accepts none."""

    def connections_of_others(self) -> list[tuple[int, int]]:
        """The others that accept: a key of each, and how many connections it has."""


class Acceptor:
    """Accepts on ``sock``, which is listening already, and makes a protocol for each connection.

    ``tls`` gives the TLS of the next connection; without it the port speaks none. A failed handshake closes
    the connection and is not reported. :meth:`lost` must be called when a connection has ended.

    One descriptor is reserved: without others, a connection is accepted and closed, so that its client sees
    the error at once.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        protocol: Callable[[], Any],
        peers: PeerConnectionCounts,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._protocol = protocol
        self._peers = peers
        self._tls = tls
        self._spare = ReserveDescriptor()
        self._connections = 0
        self._to_take = 0
        self._next_to_take = 1
        self._resting: asyncio.TimerHandle | None = None
        self._opening: dict[asyncio.Task[None], socket.socket] = {}
        sock.setblocking(False)
        peers.report_connections(0)
        loop.add_reader(sock, self._accept)

    async def close(self) -> None:
        """Stop accepting; returns when every accepted connection has its protocol. May be called again."""
        if self._sock.fileno() >= 0:
            if self._resting is not None:
                self._resting.cancel()
            else:
                self._loop.remove_reader(self._sock)
            self._peers.report_connections(-1)
            self._sock.close()
            self._spare.give()
        if self._opening:
            _, late = await asyncio.wait(list(self._opening), timeout=LAST_HANDSHAKES_S)
            for task in late:
                _give_up(self._opening[task])
            if late:
                await asyncio.wait(late)

    def lost(self) -> None:
        """A connection has ended."""
        self._count(-1)

    def _count(self, change: int) -> None:
        self._connections += change
        if self._sock.fileno() >= 0:
            self._peers.report_connections(self._connections)

    def _accept(self) -> None:
        for _ in range(MOST_IN_A_TURN):
            if not self._to_take and (lower := self._with_fewer()):
                self._pause(CHECK_S, partial(self._check, lower, self._loop.time() + LEAVE_S))
                return
            self._to_take = max(0, self._to_take - 1)
            if not self._take():
                return

    def _with_fewer(self) -> list[tuple[int, int]]:
        """The workers to which the next connection is left."""
        limit = self._connections - MARGIN
        return [other for other in self._peers.connections_of_others() if other[1] < limit]

    def _check(self, before: list[tuple[int, int]], until: float) -> None:
        """Accept again when a worker of ``before`` has taken a connection, at the latest ``until`` then."""
        now = self._peers.connections_of_others()
        if not all(other in now for other in before):
            self._next_to_take = 1
        elif self._loop.time() < until:
            self._resting = self._loop.call_later(CHECK_S, partial(self._check, before, until))
            return
        else:
            self._to_take = self._next_to_take
            self._next_to_take = min(2 * self._next_to_take, MOST_TAKEN)
        self._resume()

    def _take(self) -> bool:
        """Accept a connection, if one waits; whether one did."""
        try:
            client, _ = self._sock.accept()
        except OSError as error:  # usually none waits, or the client has disconnected
            if error.errno in _EXHAUSTED:
                self._reject()
            return False
        self._count(1)
        task = self._loop.create_task(self._open(client), name="accept")
        self._opening[task] = client
        task.add_done_callback(self._opened)
        if len(self._opening) > MOST_HANDSHAKES:
            _give_up(self._opening.pop(next(iter(self._opening))))
        return True

    def _opened(self, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)

    async def _open(self, client: socket.socket) -> None:
        try:
            if self._tls is None:
                await self._loop.connect_accepted_socket(self._protocol, client)
            else:
                await self._loop.connect_accepted_socket(
                    self._protocol,
                    client,
                    ssl=self._tls(),
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=TLS_SHUTDOWN_S,
                )
        except OSError:  # it was reset before it could be served, or speaks no TLS
            client.close()
            self.lost()

    def _reject(self) -> None:
        """Accept the oldest waiting connection with the reserve descriptor, and close it."""
        rejected = False
        if self._spare.give():
            try:
                client, _ = self._sock.accept()
                client.close()
                rejected = True
            except OSError:
                pass
        self._spare.keep()
        if not rejected:
            self._pause(REST_S, self._resume)

    def _pause(self, time_s: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._sock)
        self._resting = self._loop.call_later(time_s, then)

    def _resume(self) -> None:
        self._resting = None
        self._spare.keep()
        self._loop.add_reader(self._sock, self._accept)


def _give_up(client: socket.socket) -> None:
    """End a handshake, as if the client had."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)
