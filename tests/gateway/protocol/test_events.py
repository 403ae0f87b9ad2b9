"""Following a stream to its end, in isolation: any way of cutting gives the same events."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.protocol.errors import MAX_ERROR_BYTES
from gateway.protocol.sse_validator import (
    MAX_EVENT_BYTES,
    MAX_EVENTS,
    MAX_LINES,
    ChatValidator,
    MessagesValidator,
    ResponsesValidator,
    SseValidator,
)
from gateway.protocol.usage import TokenUsage
from tests.gateway.fake_replica import DONE, STREAM, event

CRLF = STREAM.replace(b"\n", b"\r\n")


@given(st.sampled_from([STREAM, CRLF, b": ping\n\n" + STREAM]), st.lists(st.integers(0, 2000)))
def test_any_cut_gives_identical_bytes(data: bytes, cuts: list[int]) -> None:
    tail = ChatValidator(1)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [tail.feed(data[a:b]) for a, b in itertools.pairwise(edges)]
    assert b"".join(pieces) == data
    assert tail.end(clean=True) is None
    for piece in pieces:
        assert piece == b"" or piece.endswith((b"\n\n", b"\n\r\n"))


LINE_ENDS = [b"\n", b"\r\n", b"\r"]


def parsed(data: bytes) -> list[bytes]:
    """The payloads of a stream, read line by line as the standard says."""
    events: list[list[bytes]] = [[]]
    for line in data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[:-1]:
        if not line:
            events.append([])
        elif line.startswith(b"data:"):
            events[-1].append(line[5:].strip())
    return [b"\n".join(lines) for lines in events[:-1] if lines]


@pytest.mark.slow
@given(st.lists(st.sampled_from(LINE_ENDS), min_size=11, max_size=11), st.booleans())
def test_lines_may_end_with_lf_crlf_or_cr_however_they_are_cut(ends: list[bytes], mixed: bool) -> None:
    ends = ends if mixed else ends[:1] * 11
    lines = [b": ping", b"", b"event: x", b'data: {"choices":', b"data: []}", b""]
    lines += [event(finish="stop").strip(), b"", DONE.strip(), b"", b""]
    data = b"".join(map(b"".join, zip(lines, ends, strict=True)))
    assume(len(data.splitlines()) == len(lines))  # no blank line joins the end before it to a CRLF
    for cut in range(len(data) + 1):
        tail = ChatValidator(1)
        pieces = [tail.feed(data[:cut]), tail.feed(data[cut:])]
        pieces.append(tail.rest())
        assert parsed(b"".join(pieces)) == parsed(data)
        assert tail.end(clean=True) is None
    tail = ChatValidator(1)
    bytewise = b"".join(tail.feed(data[i : i + 1]) for i in range(len(data))) + tail.rest()
    assert parsed(bytewise) == parsed(data)


@pytest.mark.parametrize("end", LINE_ENDS)
def test_an_event_does_not_wait_for_the_next(end: bytes) -> None:
    data = event("a").replace(b"\n", end)
    assert ChatValidator(1).feed(data) == data


@given(st.integers(0, len(STREAM) - 1))
def test_a_truncated_stream_is_an_error(cut: int) -> None:
    tail = ChatValidator(1)
    tail.feed(STREAM[:cut])
    assert tail.end(clean=False) is not None


@pytest.mark.parametrize(
    "payload",
    [
        b'{"choices":[{"index":0,"delta":{"content":"a',
        b'{"choices":[{"index":0,"delta":{"content":"\xff"}}]}',
        b'{"choices":[{"index":0,"finish_reason":"\xff"}]}',
        b'{"choices":[],"x":NaN}',
        b'{"choices":[],"x":Infinity}',
        b'{"choices":[]}}',
        b'{"choices":[],\r"x":1}',
        b"",
        b"hello",
    ],
)
@pytest.mark.parametrize(
    "tail", [ChatValidator(1), ResponsesValidator(), MessagesValidator()], ids=["chat", "resp", "msg"]
)
@pytest.mark.parametrize("piece", [1, 5, 1000])
def test_a_client_never_receives_broken_json(payload: bytes, tail: SseValidator, piece: int) -> None:
    tail = copy.deepcopy(tail)
    good = b'data: {"choices":[{"index":0}]}\n\n'
    data = good + b"data: " + payload + b"\n\n" + good
    out = b"".join(tail.feed(data[i : i + piece]) for i in range(0, len(data), piece))
    assert out.startswith(good)
    assert out.count(b"stream_broken") >= 1
    assert out.count(b"data: ") == 2
    for line in out.splitlines():
        if line.startswith(b"data: "):
            json.loads(line[6:])
    assert tail.failed
    assert tail.closed


def test_an_event_of_an_unknown_form_passes() -> None:
    tail = ChatValidator(1)
    for data in (b"data: [1]\n\n", b'data: {"choices":7}\n\n', b'data: {"choices":[{"index":"x"}]}\n\n'):
        assert tail.feed(data) == data


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"data: " + b"1" * MAX_EVENT_BYTES, "too large"),
        (b"data:\n" * (MAX_LINES + 1) + b"\n", "too many lines"),
        (b":\n\n" * (MAX_EVENTS + 1), "too many events"),
        (b'data: {"error":{"message":"boom","x":"%b"}}\n\n' % (b"x" * MAX_ERROR_BYTES), "reported an error"),
    ],
)
def test_an_event_that_is_dear_to_read_ends_its_stream(data: bytes, why: str) -> None:
    tail = ChatValidator(1)
    assert why.encode() in tail.feed(data)
    assert tail.closed


def test_a_comment_must_be_text() -> None:
    assert b"stream_broken" in ChatValidator(1).feed(b": \xff\n\n")


def test_a_payload_may_take_several_lines() -> None:
    tail = ChatValidator(1)
    data = b'data: {"choices":\ndata: [{"index":0,"finish_reason":"stop"}]}\n\n'
    assert tail.feed(data) == data
    assert tail.finished


@given(st.lists(st.integers(0, 2000)))
def test_usage_is_read_however_it_is_cut_and_stripped_if_we_asked(cuts: list[int]) -> None:
    counts = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    last = json.dumps({"id": "c", "choices": [], "usage": counts}).encode()
    events = event("a") + event(finish="stop")
    data = events + b"data: " + last + b"\n\n" + DONE
    for strip in (False, True):
        tail = ChatValidator(1, strip_usage=strip)
        edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
        out = b"".join(tail.feed(data[a:b]) for a, b in itertools.pairwise(edges))
        assert out == (events + DONE if strip else data)
        assert tail.usage == TokenUsage(9, 4, 3)
        assert tail.end(clean=True) is None


def test_usage_in_the_event_that_finishes_is_not_stripped() -> None:
    tail = ChatValidator(1, strip_usage=True)
    data = b'data: {"choices":[{"index":0,"finish_reason":"stop"}],"usage":{"prompt_tokens":2}}\n\n'
    assert tail.feed(data) == data
    assert tail.usage == TokenUsage(2, 0, 0)


def test_each_api_has_its_usage_format() -> None:
    responses = ResponsesValidator()
    responses.feed(
        b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":'
        b'{"input_tokens":7,"output_tokens":2,"input_tokens_details":{"cached_tokens":5}}}}\n\n'
    )
    assert responses.usage == TokenUsage(7, 5, 2)
    messages = MessagesValidator()
    messages.feed(
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":'
        b'{"input_tokens":7,"output_tokens":1,"cache_read_input_tokens":3}}}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":4}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )
    assert messages.usage == TokenUsage(10, 3, 4)
    assert messages.finished


@pytest.mark.parametrize("space", [b"", b" "])
@pytest.mark.parametrize(
    ("status", "sent"), [(b"500", b'"code":"stream_broken"'), (b"400", b'"type":"invalid_request_error"')]
)
def test_an_error_is_sent_once_in_our_envelope(space: bytes, status: bytes, sent: bytes) -> None:
    tail = ChatValidator(1)
    out = tail.feed(b"data:" + space + b'{"error":{"message":"boom","code":%b}}\n\n' % status + DONE)
    assert out.count(b"boom") == 1
    assert b"DONE" not in out
    assert sent in out
    assert tail.failed
    assert tail.end(clean=True) is None


@pytest.mark.parametrize(("kind", "error", "failed"), [("failed", b"{}", True), ("created", b"null", False)])
def test_a_failed_response_is_passed_and_is_no_success(kind: str, error: bytes, failed: bool) -> None:
    tail = ResponsesValidator()
    name = b"response." + kind.encode()
    data = b'event: %b\ndata: {"type":"%b","response":{"error":%b}}\n\n' % (name, name, error)
    assert tail.feed(data) == data
    assert tail.failed is failed


def test_an_anthropic_error_ends_its_stream() -> None:
    tail = MessagesValidator()
    out = tail.feed(b'event: error\ndata: {"type":"error","error":{"message":"boom"}}\n\n')
    assert out.startswith(b"event: error\n")
    assert tail.failed


@pytest.mark.parametrize(
    ("tail", "event", "ends"),
    [
        (ResponsesValidator(), "response.completed", True),
        (ResponsesValidator(), "response.created", False),
        (MessagesValidator(), "message_stop", True),
        (MessagesValidator(), "message_start", False),
    ],
)
def test_each_api_has_its_final_event(tail: SseValidator, event: str, ends: bool) -> None:
    data = b'event: %b\ndata: {"type":"%b"}\n\n' % (event.encode(), event.encode())
    assert tail.feed(data) == data
    assert (tail.end(clean=True) is None) is ends
