"""Accepts connections, one at a time, from a listening socket that several workers share.

uvloop's own server accepts all that wait, and closes for good after most failures of accept().
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

from gateway.http.reserve_descriptor import ReserveDescriptor

# The machine is out of some resource: waiting clients are closed, and those being served go on.
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# Pause when no connection can be accepted even to close it; without it the loop would spin.
REST_S = 0.05


class Acceptor:
    """Accepts on ``sock``, which is listening already, and makes a protocol for each connection.

    One descriptor is reserved: without others, a connection is accepted and closed, so that its client sees
    the error at once.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: Callable[[], Any]
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._protocol = protocol
        self._spare = ReserveDescriptor()
        self._resting: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        loop.add_reader(sock, self._accept)

    async def close(self) -> None:
        """Stop accepting; returns when every accepted connection has its protocol. May be called again."""
        if self._sock.fileno() >= 0:
            if self._resting is not None:
                self._resting.cancel()
            else:
                self._loop.remove_reader(self._sock)
            self._sock.close()
            self._spare.give()
        if self._opening:
            await asyncio.wait(self._opening)

    def _accept(self) -> None:
        try:
            client, _ = self._sock.accept()
        except OSError as error:  # usually another worker was faster, or the client has disconnected
            if error.errno in _EXHAUSTED:
                self._reject()
            return
        task = self._loop.create_task(self._open(client), name="accept")
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, client)
        except OSError:  # it was reset before it could be served
            client.close()

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
            self._loop.remove_reader(self._sock)
            self._resting = self._loop.call_later(REST_S, self._wake)

    def _wake(self) -> None:
        self._resting = None
        self._spare.keep()
        self._loop.add_reader(self._sock, self._accept)
