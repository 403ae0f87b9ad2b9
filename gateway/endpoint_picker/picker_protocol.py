"""Messages to Envoy (``envoy.service.ext_proc.v3``) in the form of the Endpoint Picker Protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from gateway.endpoint_picker.ext_proc_messages import OVERWRITE_IF_EXISTS_OR_ADD, ProcessingResponse

DESTINATION = "x-gateway-destination-endpoint"
_NAMESPACE = "envoy.lb"
_SUBSET, _SUBSET_NAMESPACE = "x-gateway-destination-endpoint-subset", b"envoy.lb.subset_hint"
# Envoy takes at most so much of a body in one message.
CHUNK_BYTES = 62 * 1024

Headers = Iterable[tuple[bytes, bytes]]


def headers_of(message: Any) -> list[tuple[bytes, bytes]]:
    """The headers in an ``HttpHeaders`` message; names are lower case."""
    return [(each.key, each.raw_value or each.value) for each in message.headers.headers]


def subset_of(message: Any) -> frozenset[str] | None:
    """The endpoints that the proxy allows, as ``IP:PORT``; ``None`` for all."""
    metadata = {each.key: each.value.fields for each in message.metadata_context.filter_metadata}
    hint = metadata.get(_SUBSET_NAMESPACE, {})
    if _SUBSET not in hint:
        return None
    found = hint[_SUBSET]
    if found.WhichOneof("kind") == "string_value":
        return frozenset(part.strip() for part in found.string_value.split(",") if part.strip())
    return frozenset(value.string_value for value in found.list_value.values)


def destination(endpoint: str, headers: Headers, remove: Iterable[bytes]) -> Any:
    """The request's headers go to ``endpoint``, with ``headers`` in place of those to ``remove``."""
    answer = ProcessingResponse()
    _mutate(answer.request_headers, [(DESTINATION.encode(), endpoint.encode()), *headers], remove)
    answer.dynamic_metadata.update({_NAMESPACE: {DESTINATION: endpoint}})
    return answer


def request_body(body: bytes, *, trailers: bool) -> Iterator[Any]:
    """All of the request's body, whose end is that of the stream unless ``trailers`` follow."""
    yield from _parts("request_body", body, last=not trailers)
    if trailers:
        answer = ProcessingResponse()
        answer.request_trailers.SetInParent()
        yield answer


def response_headers(headers: Headers, remove: Iterable[bytes]) -> Any:
    answer = ProcessingResponse()
    _mutate(answer.response_headers, headers, remove)
    return answer


def response_body(body: bytes, *, last: bool) -> Iterator[Any]:
    """A part of the answer's body."""
    return _parts("response_body", body, last=last)


def immediate(status: int, headers: Headers, body: bytes) -> Any:
    """An answer without any replica."""
    answer = ProcessingResponse()
    answer.immediate_response.status.code = status
    answer.immediate_response.body = body
    for name, value in headers:
        _set(answer.immediate_response.headers, name, value)
    return answer


def _parts(field: str, body: bytes, *, last: bool) -> Iterator[Any]:
    """``body`` in messages that have a part of it in ``field``; with ``last`` the stream ends with it."""
    for at in range(0, max(len(body), 1), CHUNK_BYTES):
        answer = ProcessingResponse()
        streamed = getattr(answer, field).response.body_mutation.streamed_response
        streamed.body = body[at : at + CHUNK_BYTES]
        streamed.end_of_stream = last and at + CHUNK_BYTES >= len(body)
        yield answer


def _mutate(answer: Any, headers: Headers, remove: Iterable[bytes]) -> None:
    for name, value in headers:
        _set(answer.response.header_mutation, name, value)
    answer.response.header_mutation.remove_headers.extend(remove)


def _set(mutation: Any, name: bytes, value: bytes) -> None:
    option = mutation.set_headers.add()
    option.header.key = name
    option.header.raw_value = value
    option.append_action = OVERWRITE_IF_EXISTS_OR_ADD
