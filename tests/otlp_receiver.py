"""A receiver of OTLP over HTTP in this process: the spans that it was sent, by the names of their fields."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue


class ReceivedSpan(msgspec.Struct, frozen=True):
    """Times are Unix seconds; ``events`` are instants by name, ``service`` is who sent it."""

    service: str
    name: str
    begin: float
    end: float
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Any]
    events: dict[str, float]
    status: int


class OtlpReceiver:
    """``bodies`` are the received messages. With another ``status`` it takes none."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.status = 200
        self.url = ""

    @property
    def spans(self) -> list[ReceivedSpan]:
        return [span for body in list(self.bodies) for span in _spans(body)]


def _spans(body: bytes) -> Iterator[ReceivedSpan]:
    for part in ExportTraceServiceRequest.FromString(body).resource_spans:
        service = _values(part.resource.attributes)["service.name"]
        for span in (span for scope in part.scope_spans for span in scope.spans):
            yield ReceivedSpan(
                service=service,
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                begin=span.start_time_unix_nano / 1e9,
                end=span.end_time_unix_nano / 1e9,
                attributes=_values(span.attributes),
                events={event.name: event.time_unix_nano / 1e9 for event in span.events},
                status=span.status.code,
            )


def _values(pairs: Any) -> dict[str, Any]:
    def value(pair: KeyValue) -> Any:
        found = getattr(pair.value, kind := str(pair.value.WhichOneof("value")))
        return (
            [getattr(each, str(each.WhichOneof("value"))) for each in found.values]
            if "array" in kind
            else found
        )

    return {pair.key: value(pair) for pair in pairs}


@contextmanager
def receiving() -> Iterator[OtlpReceiver]:
    """A receiver on a free port of loopback."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if receiver.status == 200 and self.path == "/v1/traces":
                receiver.bodies.append(body)
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
