"""HTTP/1.1 requests and responses without I/O, for the clients of replay, calibration and the load tests."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import httptools


class Origin:
    """The server of an http or https URL, and the requests to it."""

    def __init__(self, url: str, key: str = "") -> None:
        """The path of ``url``, without a ``/v1`` at its end, prefixes each request's.

        Raises :class:`ValueError` for another URL.
        """
        split = urlsplit(url)
        if split.scheme not in ("http", "https") or split.hostname is None:
            raise ValueError(f"{url!r} is no URL: expected such as http://127.0.0.1:8080")
        self.tls = ssl.create_default_context() if split.scheme == "https" else None
        self.host = split.hostname
        self.port = split.port or (443 if self.tls else 80)
        self._prefix = split.path.rstrip("/").removesuffix("/v1")
        self._headers = f"host: {split.netloc.rpartition('@')[2]}\r\n"
        if key:
            self._headers += f"authorization: Bearer {key}\r\n"
        self._json = f"content-type: application/json\r\n{self._headers}"

    def get(self, path: str) -> bytes:
        """A GET of ``path``."""
        return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, path: str, body: bytes) -> bytes:
        """A POST of JSON to ``path``."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._json}content-length: {len(body)}\r\n\r\n"
        return head.encode() + body


class Response:
    """One response, read by read.

    ``feed`` gets the body bytes of each read with its instant. ``keep_alive`` says, once the response is
    ``complete``, whether the connection can be used again.
    """

    def __init__(self, feed: Callable[[bytes, float], object]) -> None:
        self.complete = False
        self.keep_alive = False
        self.status = 0
        self._feed = feed
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._has_length = self._until_close = False

    def read(self, data: bytes, at: float) -> None:
        """Take the bytes of one read; raises :class:`OSError` when they are no HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise OSError(f"no answer of HTTP: {error}") from error
        if self._body:
            body = b"".join(self._body)
            self._body.clear()
            self._feed(body, at)

    def close(self) -> None:
        """The server has closed the connection; raises :class:`ConnectionResetError` before the end."""
        if not self.complete and not self._until_close:
            raise ConnectionResetError("the connection was closed before the answer was complete")
        self.complete = True

    # The parser's callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with each header; a response without one of these ends with its connection."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Called before the body."""
        self.status = self._parser.get_status_code()
        self._until_close = not self._has_length

    def on_body(self, data: bytes) -> None:
        """Called with each piece of the body."""
        self._body.append(data)

    def on_message_complete(self) -> None:
        """Called at the end; afterwards the parser is ready for the next response and no longer knows."""
        self.complete = True
        self.keep_alive = self._parser.should_keep_alive()
