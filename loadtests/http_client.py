"""A blocking HTTP/1.1 connection that gives the instant of each read.

Under locust its sockets are gevent's, as locust patches them when it is imported.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from time import perf_counter
from types import TracebackType

from tidegate.replay.http_client import STALE_S, HttpOrigin, ReplayResponse

# Longer than the queue timeout of the gateway.
READ_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 10.0
READ_BYTES = 65536

Sink = Callable[[bytes, float], bool]


class BlockingHttpConnection:
    """Requests to one server, one at a time; connects when needed and again after it was closed.

    ``began`` is the instant in ``perf_counter`` seconds at which the last request was written, after
    connecting; ``ended`` is that of the last read.
    """

    def __init__(self, base_url: str, api_key: str = "") -> None:
        """See :class:`HttpOrigin`."""
        self._origin = HttpOrigin(base_url, api_key)
        self._socket: socket.socket | None = None
        self._begun = False
        self.began = self.ended = 0.0

    def __enter__(self) -> BlockingHttpConnection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        self.close()

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        body = bytearray()

        def keep(data: bytes, at: float) -> bool:
            body.extend(data)
            return True

        answer = self._exchange(self._origin.get(path), keep, CONNECT_TIMEOUT_S)
        return answer.status, bytes(body)

    def post(
        self, path: str, body: bytes, sink: Sink, *, timeout_s: float = READ_TIMEOUT_S
    ) -> ReplayResponse:
        """Send ``body`` as JSON; each read's body bytes go to ``sink`` with the instant of the read.

        A sink that returns False ends the connection, and the response is not complete. Raises
        :class:`TimeoutError` after ``timeout_s`` of silence, and :class:`OSError` when the connection fails.
        """
        return self._exchange(self._origin.post(path, body), sink, timeout_s)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, request: bytes, sink: Sink, timeout_s: float) -> ReplayResponse:
        kept = self._socket is not None
        try:
            try:
                return self._once(request, sink, timeout_s)
            except ConnectionError:
                if not kept or self._begun or perf_counter() - self.began > STALE_S:
                    raise
                self.close()
                return self._once(request, sink, timeout_s)
        except BaseException:  # also when the user is stopped, so that the server sees the abort
            self.close()
            raise

    def _once(self, request: bytes, sink: Sink, timeout_s: float) -> ReplayResponse:
        connection = self._socket or self._connect()
        connection.settimeout(timeout_s)
        self._begun, wanted = False, True

        def feed(data: bytes, at: float) -> None:
            nonlocal wanted
            wanted = sink(data, at)

        response = ReplayResponse(feed)
        self.began = perf_counter()
        connection.sendall(request)
        while wanted and not response.complete:
            data = connection.recv(READ_BYTES)
            self.ended = perf_counter()
            if data:
                self._begun = True
                response.read(data, self.ended)
            else:
                response.close()
        if not response.keep_alive:
            self.close()
        return response

    def _connect(self) -> socket.socket:
        origin = self._origin
        made = socket.create_connection((origin.host, origin.port), CONNECT_TIMEOUT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = origin.tls.wrap_socket(made, server_hostname=origin.host) if origin.tls else made
        return self._socket
