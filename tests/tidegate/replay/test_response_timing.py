"""Timings of a stream are read from chunks of any size."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.replay.response_timing import StreamTimings


def event(finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": "tide", "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 90, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
WHOLE = event() + event() + b": a comment\n\n" + event("length") + LAST


@settings(max_examples=40)
@given(st.lists(st.integers(1, len(WHOLE)), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_result(cuts: list[int]) -> None:
    timings = StreamTimings()
    edges = [0, *sorted(set(cuts) - {len(WHOLE)}), len(WHOLE)]
    for at, (begin, end) in enumerate(pairwise(edges), 1):
        timings.feed(WHOLE[begin:end], float(at))
    timings.end(200)
    assert (timings.error, timings.events, timings.chunks) == ("", 5, 3)
    assert (timings.input_tokens, timings.output_tokens, timings.cached_tokens) == (90, 5, 64)
    assert timings.first_at is not None and timings.finished_at is not None
    assert timings.first_event_at is not None
    assert timings.first_event_at == timings.first_at <= timings.finished_at <= timings.ended_at
    # The blank line after the last event may come in a read of its own.
    last = next(at for at, end in enumerate(edges[1:], 1) if end >= len(WHOLE) - 1)
    assert timings.first_event_at + sum(timings.gaps) == last


def test_itl_is_per_token_after_the_first() -> None:
    timings = StreamTimings()
    timings.feed(event(), 10.0)
    timings.feed(event("stop"), 12.0)
    assert timings.itl_s() == 2.0  # without usage, by chunks
    timings.feed(LAST, 13.0)
    assert (timings.itl_s(), timings.gap_s()) == (0.5, 2.0)  # four tokens in one gap
    assert (timings.ended_at, timings.gaps) == (13.0, [2.0, 1.0])


def test_half_an_event_and_a_comment_are_not_a_first_event() -> None:
    timings = StreamTimings()
    timings.feed(b": waiting\n\n" + event()[:20], 1.0)
    assert timings.first_event_at is None
    timings.feed(event()[20:], 2.0)
    assert (timings.first_event_at, timings.first_at, timings.gaps) == (2.0, 2.0, [])


def test_lines_may_end_in_carriage_returns() -> None:
    timings = StreamTimings()
    timings.feed(WHOLE.replace(b"\n", b"\r\n"), 1.0)
    assert (timings.finished_at, timings.output_tokens) == (1.0, 5)


def test_an_error_is_an_event_and_no_chunk() -> None:
    timings = StreamTimings()
    timings.feed(b'data: {"error": "plain"}\n\n', 1.0)
    assert (timings.first_event_at, timings.first_at, timings.error) == (1.0, None, "plain")


def test_a_whole_answer_has_its_usage() -> None:
    timings = StreamTimings()
    body = b'{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":5,"completion_tokens":9}}'
    timings.take(body, 1.0)
    timings.end(200)
    assert (timings.error, timings.input_tokens, timings.output_tokens) == ("", 5, 9)


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, event(), "the answer ended without a finish_reason"),
        (200, b'data: {"error": {"message": "lost", "code": 500}}\n\n', "lost"),
        (200, b"data: [1]\n\n", "not an answer of this API"),
        (429, b'{"error": {"message": "the queue\\nis full"}}', "the queue\nis full"),
        (503, b"<html>\nno\n</html>", "<html>\nno\n</html>"),
        (502, b"", "status 502"),
        (404, b'{"detail": "nothing here"}', '{"detail": "nothing here"}'),
    ],
)
def test_incomplete_answers_have_an_error(status: int, body: bytes, error: str) -> None:
    timings = StreamTimings()
    timings.feed(body, 1.0)
    timings.end(status)
    assert timings.error.startswith(error)
