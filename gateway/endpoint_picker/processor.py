"""One request of another proxy: the pipeline admits and routes it, and sees its answer pass.

The proxy (Envoy's filter ``ext_proc``, bodies ``FULL_DUPLEX_STREAMED``) hands over the request, waits for the
replica's address, sends the request there, and hands over the answer. To the pipeline the proxy is a
connection to the replica and a client at once. A request that was sent cannot be sent again: nothing is
retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.types import Message, Scope

from gateway.endpoint_picker import picker_protocol
from gateway.http.asgi_exchange import SENT
from gateway.http.http1_client import ResponseSink
from gateway.http.upload_budget import PendingBody, Upload, UploadBudget
from gateway.protocol.errors import Refused
from gateway.protocol.paths import ROUTES, ProxyRoute, is_anthropic
from gateway.request_pipeline import Gateway
from policy.errors import Refusal

# Of an answer that waits to be sent, from which on the proxy is read no further.
MAX_UNSENT = 256 * 1024
# The proxy's own headers, which it keeps.
_KEPT = (b"x-forwarded-", b"x-envoy-", b"x-request-id")
# Of a refusal that means that the fleet is too busy: the protocol's status for it.
_DROPPED = 429


class Processor:
    """One stream of messages; ``write`` sends one to the proxy. ``uploads`` bound what is held of bodies."""

    def __init__(
        self, gateway: Gateway, uploads: UploadBudget, write: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._gateway = gateway
        self._uploads = uploads
        self._upload: Upload | None = None
        self._pending: PendingBody | None = None
        self._write = write
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._unsent = 0
        self._drained: asyncio.Future[None] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._request: list[tuple[bytes, bytes]] = []
        self._route: ProxyRoute | None = None
        self._scope: Scope = {}
        self._limit = 0
        self._body = bytearray()
        self._subset: frozenset[str] | None = None
        self._has_trailers = False
        self._endpoint = ""
        self._sink: ResponseSink | None = None
        self._reading = asyncio.Event()
        self._reading.set()
        self._head: Message | None = None
        self._own = bytearray()
        self._answer: list[tuple[bytes, bytes]] | None = None
        self._answering = self._ended = False
        self.received = False

    async def run(self, incoming: AsyncIterator[Any]) -> None:
        """Serve until the proxy ends the stream, or the request is answered without a replica."""
        writing = asyncio.create_task(self._write_all())
        try:
            async for message in incoming:
                self._take(message)
                await self._reading.wait()
                if self._ended:
                    break
        finally:
            # Its client left, or the replica broke the answer off: the proxy does not say which.
            self._sink = None
            self._release()
            if self._serving is not None:
                if not self._ended:
                    self._serving.cancel()
                await asyncio.gather(self._serving, return_exceptions=True)
            self.body_checked()
            self._outgoing.put_nowait(None)
            await writing

    # From the proxy

    def _take(self, message: Any) -> None:
        self.received = True
        match message.WhichOneof("kind"):
            case "request_headers":
                self._request = picker_protocol.headers_of(message.request_headers)
                self._subset = picker_protocol.subset_of(message)
                self._read_head()
                if message.request_headers.end_of_stream or self._limit == 0:
                    self._begin()
            case "request_body":
                self._body += message.request_body.body
                waiting, last = self._serving is None and not self._ended, message.request_body.end_of_stream
                if len(self._body) > self._limit and (waiting or not last):
                    self._refuse(Refused(Refusal.TOO_LARGE, f"The body is larger than {self._limit} bytes."))
                elif last:
                    self._begin()
                elif waiting:
                    self._hold()
            case "request_trailers":
                self._has_trailers = True
                self._begin()
            case "response_headers":
                self._begin_answer(message.response_headers)
            case "response_body":
                self._pass(message.response_body.body, complete=message.response_body.end_of_stream)
            case "response_trailers":
                self._pass(b"", complete=True)

    def _read_head(self) -> None:
        pseudo = {name: value.decode("latin-1") for name, value in self._request if name[:1] == b":"}
        path, _, query = pseudo.get(b":path", "/").partition("?")
        method = pseudo.get(b":method", "GET")
        self._scope = {
            "type": "http", "http_version": "1.1", "method": method, "scheme": "http", "root_path": "",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "server": None,
            "client": None,
            "headers": [(name, value) for name, value in self._request if name[:1] != b":"],
        }  # fmt: skip
        if method == "POST":
            self._route = ROUTES.get(path)
        # What is no inference has no body. Without a valid key none is read.
        self._limit = self._gateway.body_limit(self._scope)

    def _hold(self) -> None:
        if self._upload is None:
            # An address has a budget too, and all come from the proxy: each stream counts as an address.
            self._upload = self._uploads.begin(self, (f"stream {id(self)}",))
        self._uploads.hold(self._upload, len(self._body), self._limit - len(self._body))

    def _release(self) -> None:
        if self._upload is not None:
            self._uploads.end(self._upload)
            self._upload = None

    # A Receiver

    def hold_back(self) -> None:
        self._reading.clear()

    def read_on(self) -> None:
        self._reading.set()

    def shed(self, refused: Refused) -> None:
        self._upload = None
        self._body.clear()
        self._refuse(refused)

    def _begin(self) -> None:
        """The request is complete: serve it; what is no inference by the gateway's own application."""
        if self._serving is not None or self._ended:
            return
        self._release()
        body = bytes(self._body)
        self._body.clear()
        self._pending = self._uploads.keep((f"stream {id(self)}",), len(body))

        parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not parts:  # who leaves is cancelled
                await asyncio.get_running_loop().create_future()
            return parts.pop()

        async def send(message: Message) -> None:
            self._send(message)

        if self._route is None:
            work = self._gateway.client(self._scope, receive, send)
        else:
            scope = {**self._scope, "tidegate.proxied": self}
            work = self._gateway.serve(self._route, scope, receive, self._send)
        self._serving = asyncio.create_task(work)

    def _begin_answer(self, message: Any) -> None:
        self._answer = picker_protocol.headers_of(message)
        found = dict(self._answer)
        if self._sink is not None:
            self._sink.on_head(int(found.get(b":status", b"0")), found)
            if message.end_of_stream:
                self._pass(b"", complete=True)

    def _pass(self, data: bytes, *, complete: bool) -> None:
        sink = self._sink
        if complete:
            self._sink = None
        if sink is not None:
            sink.on_data(data, complete=complete)

    # A ProxiedConnection

    def allowed(self, urls: Mapping[str, str]) -> frozenset[str] | None:
        if self._subset is None:
            return None
        found = frozenset(name for name, url in urls.items() if urlsplit(url).netloc in self._subset)
        if not found:
            raise Refused(Refusal.NO_REPLICA, "No endpoint that the proxy allows serves this model.")
        return found

    def body_checked(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._uploads.release(pending)

    def to(self, url: str) -> None:
        self._endpoint = urlsplit(url).netloc

    def send(self, sink: ResponseSink, head: bytes, body: bytes | Sequence[bytes | memoryview]) -> None:
        self._sink = sink
        line, *lines = head.rstrip(b"\r\n").split(b"\r\n")
        given = [(name, value) for name, _, value in (each.partition(b": ") for each in lines)]
        headers = [(name, value) for name, value in given if name != b"host"]
        path = line.split(b" ")[1]
        if path != dict(self._request).get(b":path"):
            headers.append((b":path", path))
        sent = {name for name, _ in headers}
        whole = body if isinstance(body, bytes) else b"".join(body)
        self._put(picker_protocol.destination(self._endpoint, headers, _unwanted(self._request, sent)))
        for message in picker_protocol.request_body(whole, trailers=self._has_trailers):
            self._put(message)

    def pause(self, sink: ResponseSink) -> None:
        self._reading.clear()

    def resume(self, sink: ResponseSink) -> None:
        self._reading.set()

    def abort(self, sink: ResponseSink) -> None:
        if self._sink is sink:
            self._sink = None

    # To the proxy

    def _send(self, message: Message) -> Awaitable[None]:
        """A part of the pipeline's answer, an ASGI message; returns :data:`SENT`, or a future to wait for."""
        if message["type"] == "http.response.start":
            self._head = message
            return SENT
        if self._ended:
            return SENT
        body: bytes = message.get("body", b"")
        last = not message.get("more_body", False)
        head = self._head
        if not self._answering:
            assert head is not None
            if self._answer is None or head["status"] != 200:
                self._own += body
                if last:
                    self._answer_at_once(head, bytes(self._own))
                return SENT
            self._answering = True
            sent = {name for name, _ in head["headers"]}
            self._put(picker_protocol.response_headers(head["headers"], _unwanted(self._answer, sent)))
        if body or last:
            for part in picker_protocol.response_body(body, last=last):
                self._put(part)
            self._unsent += len(body)
        self._ended = last
        if self._unsent <= MAX_UNSENT:
            return SENT
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
        return self._drained

    def _refuse(self, refused: Refused) -> None:
        """Refuse the request before the pipeline has it."""
        body = refused.body(anthropic=is_anthropic(self._scope["path"]))
        self._put(picker_protocol.immediate(refused.status, refused.headers(), body))
        self._ended = True
        self._reading.set()

    def _answer_at_once(self, head: Message, body: bytes) -> None:
        status: int = head["status"]
        if status == 503 and _is_dropped(body):
            status = _DROPPED
        headers = [(name, value) for name, value in head["headers"] if name != b"content-length"]
        self._put(picker_protocol.immediate(status, headers, body))
        self._ended = True
        self._reading.set()

    def _put(self, message: Any) -> None:
        self._outgoing.put_nowait(message)

    async def _write_all(self) -> None:
        while (message := await self._outgoing.get()) is not None:
            try:
                await self._write(message)
            except Exception:  # noqa: BLE001 - the proxy has ended the stream, in whatever way
                self._lose()
                return
            if message.WhichOneof("kind") == "response_body":
                self._unsent -= len(message.response_body.response.body_mutation.streamed_response.body)
                if self._unsent <= MAX_UNSENT // 2:
                    self._drain()

    def _drain(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    def _lose(self) -> None:
        """The proxy takes nothing more: what waits for that is woken, or cancelled."""
        if not self._ended and self._serving is not None:
            self._serving.cancel()
        self._ended = True
        self._reading.set()
        self._drain()


def _unwanted(headers: Sequence[tuple[bytes, bytes]], sent: set[bytes]) -> list[bytes]:
    """The headers that are not passed on: all but those that are set, and the proxy's own."""
    names = dict.fromkeys(name for name, _ in headers)
    return [name for name in names if name[:1] != b":" and name not in sent and not name.startswith(_KEPT)]


def _is_dropped(body: bytes) -> bool:
    """Whether an error says that the fleet is too busy for this request."""
    try:
        return bool(msgspec.json.decode(body)["error"]["code"] == Refusal.OVERLOADED.value)
    except (ValueError, LookupError, TypeError):
        return False
