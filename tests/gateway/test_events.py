"""Following a stream to its end, in isolation: any way of cutting gives the same events."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.body import depth_exceeds
from gateway.sse import MAX_EVENT_BYTES, ChatTail, MessagesTail, ResponsesTail
from tests.gateway.fake_replica import DONE, STREAM, event

CRLF = STREAM.replace(b"\n", b"\r\n")


@given(st.sampled_from([STREAM, CRLF, b": ping\n\n" + STREAM]), st.lists(st.integers(0, 2000)))
def test_any_cut_gives_identical_bytes(data: bytes, cuts: list[int]) -> None:
    tail = ChatTail(1)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [tail.feed(data[a:b]) for a, b in itertools.pairwise(edges)]
    assert b"".join(pieces) == data
    assert tail.end(clean=True) is None
    for piece in pieces:
        assert piece == b"" or piece.endswith((b"\n\n", b"\n\r\n"))


@given(st.integers(0, len(STREAM) - 1))
def test_no_proper_part_of_a_stream_passes_for_the_whole(cut: int) -> None:
    tail = ChatTail(1)
    tail.feed(STREAM[:cut])
    assert tail.end(clean=False) is not None


def test_text_that_looks_like_an_end_is_not_one() -> None:
    tail = ChatTail(1)
    tail.feed(event('"finish_reason":"stop" data: [DONE] {"error":{}}'))
    assert tail.end(clean=True) is not None


def test_bytes_that_are_no_text_finish_nothing() -> None:
    tail = ChatTail(1)
    data = event(finish="stop").replace(b'"stop"', b'"\xff"')
    assert tail.feed(data) == data
    assert tail.end(clean=True) is not None


def test_an_event_without_end_is_bounded() -> None:
    tail = ChatTail(1)
    out = b"".join(tail.feed(b"x" * (1 << 20)) for _ in range(2 + MAX_EVENT_BYTES // (1 << 20)))
    assert b'"stream_broken"' in out
    assert tail.feed(event("late")) == b""


@pytest.mark.parametrize("space", [b"", b" "])
def test_an_error_is_said_once_in_our_envelope(space: bytes) -> None:
    tail = ChatTail(1)
    out = tail.feed(b"data:" + space + b'{"error":{"message":"boom","code":500}}\n\n' + DONE)
    assert out.count(b"boom") == 1
    assert b"DONE" not in out
    assert b'"code":"stream_broken"' in out
    assert tail.failed
    assert tail.end(clean=True) is None


def test_a_failed_response_is_passed_and_is_no_success() -> None:
    tail = ResponsesTail()
    data = b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{}}}\n\n'
    assert tail.feed(data) == data
    assert tail.failed


def test_an_error_inside_a_response_object_is_not_the_streams() -> None:
    tail = ResponsesTail()
    data = b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}\n\n'
    assert tail.feed(data) == data
    assert not tail.failed


def test_an_anthropic_error_ends_its_stream() -> None:
    tail = MessagesTail()
    out = tail.feed(b'event: error\ndata: {"type":"error","error":{"message":"boom"}}\n\n')
    assert out.startswith(b"event: error\n")
    assert tail.failed


@given(
    st.recursive(st.just("x"), lambda inner: st.lists(inner, max_size=3), max_leaves=20), st.integers(1, 6)
)
def test_depth_is_that_of_the_nesting(value: object, limit: int) -> None:
    def depth(value: object) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    raw = json.dumps({"a": value, 'quo"te[[[[[': "[[[[[[[\\"}).encode()
    assert depth_exceeds(raw, limit) is (depth(value) + 1 > limit)
