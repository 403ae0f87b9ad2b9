"""One kept HTTP/1.1 connection that says when each read came: cheap, and exact to the socket.

Blocking sockets; under locust they are gevent's, as locust patches them when it is imported.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from urllib.parse import urlsplit

import httptools

# Silence longer than this is a failure; the gateway's own queue gives up well before it.
READ_TIMEOUT_S = 300.0
CONNECT_TIMEOUT_S = 10.0
READ_BYTES = 65536

Sink = Callable[[bytes, float], bool]


class Gone(Exception):
    """The server closed the connection before its answer was complete."""


@dataclass(slots=True)
class Answer:
    """One response. ``ended`` is the moment of its last read in ``perf_counter`` seconds.

    ``complete`` is false when this side hung up first.
    """

    ended: float = 0.0
    status: int = 0
    complete: bool = False
    body: list[bytes] = field(default_factory=list)

    def on_body(self, data: bytes) -> None:
        """Called by the parser with the body bytes of the read at hand."""
        self.body.append(data)

    def on_message_complete(self) -> None:
        """Called by the parser at the end of the message."""
        self.complete = True


class Connection:
    """Requests to one server, one at a time; connects when needed and again after a hang-up.

    ``began`` is the moment in ``perf_counter`` seconds at which the last request was written: making
    the connection is no part of a request's time.
    """

    def __init__(self, base_url: str, api_key: str = "") -> None:
        """``base_url`` is http or https; its path prefixes every request's. Raises ValueError for others."""
        split = urlsplit(base_url)
        if split.scheme not in ("http", "https") or split.hostname is None:
            raise ValueError(f"{base_url!r} is not an http or https URL")
        self._tls = ssl.create_default_context() if split.scheme == "https" else None
        self._host = split.hostname
        self._port = split.port or (443 if self._tls else 80)
        self._prefix = split.path.rstrip("/")
        self._constant = f"host: {split.netloc.rpartition('@')[2]}\r\n"
        if api_key:
            self._constant += f"authorization: Bearer {api_key}\r\n"
        self._socket: socket.socket | None = None
        self._begun = False
        self.began = 0.0

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, t: TracebackType | None
    ) -> None:
        self.close()

    def get(self, path: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> tuple[int, bytes]:
        """Status and body of a GET."""
        parts: list[bytes] = []

        def keep(data: bytes, at: float) -> bool:
            parts.append(data)
            return True

        answer = self._exchange(self._head("GET", path), keep, timeout_s)
        return answer.status, b"".join(parts)

    def post(self, path: str, body: bytes, sink: Sink, *, timeout_s: float = READ_TIMEOUT_S) -> Answer:
        """Send ``body`` as JSON; each read's body bytes go to ``sink`` with the moment of the read.

        A sink that returns False hangs up. Raises TimeoutError after ``timeout_s`` of silence,
        :class:`Gone` or another OSError when the connection breaks.
        """
        more = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        return self._exchange(self._head("POST", path, more) + body, sink, timeout_s)

    def close(self) -> None:
        """Hang up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _head(self, method: str, path: str, more: str = "") -> bytes:
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._constant}{more}\r\n".encode()

    def _exchange(self, request: bytes, sink: Sink, timeout_s: float) -> Answer:
        kept = self._socket is not None
        try:
            try:
                return self._once(request, sink, timeout_s)
            except (Gone, ConnectionError):
                # A kept connection that the server has closed meanwhile says so without a byte.
                if not kept or self._begun:
                    raise
                self.close()
                return self._once(request, sink, timeout_s)
        except BaseException:  # also when the user is stopped: the server must see the hang-up
            self.close()
            raise

    def _once(self, request: bytes, sink: Sink, timeout_s: float) -> Answer:
        connection = self._socket or self._connect()
        connection.settimeout(timeout_s)
        self._begun = False
        answer = Answer()
        parser = httptools.HttpResponseParser(answer)
        self.began = perf_counter()
        connection.sendall(request)
        while not answer.complete:
            data = connection.recv(READ_BYTES)
            at = answer.ended = perf_counter()
            if not data:
                raise Gone("the connection was closed before the answer was complete")
            self._begun = True
            parser.feed_data(data)
            answer.status = parser.get_status_code()
            if answer.body:
                joined = b"".join(answer.body)
                answer.body.clear()
                if not sink(joined, at) and not answer.complete:
                    self.close()
                    return answer
        if not parser.should_keep_alive():
            self.close()
        return answer

    def _connect(self) -> socket.socket:
        made = socket.create_connection((self._host, self._port), CONNECT_TIMEOUT_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = self._tls.wrap_socket(made, server_hostname=self._host) if self._tls else made
        return self._socket
