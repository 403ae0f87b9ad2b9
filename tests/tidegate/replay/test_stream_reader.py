"""What a stream says is read from any pieces of it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.replay.stream_reader import StreamTimings


def event(finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": "tide", "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 90, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\ndata: [DONE]\n\n"
WHOLE = event() + event() + b": a comment\n\n" + event("length") + LAST


@settings(max_examples=25)
@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_pieces_make_no_difference(cuts: list[int]) -> None:
    reading = StreamTimings()
    edges = [0, *sorted(cuts), len(WHOLE)]
    for begin, end in pairwise(edges):
        reading.feed(WHOLE[begin:end], float(end))
    reading.end(200)
    assert reading.error == "" and reading.events == 3
    assert (reading.input_tokens, reading.output_tokens, reading.cached_tokens) == (90, 5, 64)
    assert reading.first_at is not None and reading.finished_at is not None
    assert len(event()) <= reading.first_at <= reading.finished_at <= reading.ended_at == len(WHOLE)


def test_the_gap_is_by_the_tokens_after_the_first() -> None:
    reading = StreamTimings()
    reading.feed(event(), 10.0)
    reading.feed(event("stop"), 12.0)
    assert reading.itl_s() == 2.0  # two events, and nothing else to go by
    reading.feed(LAST, 13.0)
    assert reading.itl_s() == 0.5
    assert reading.ended_at == 13.0


def test_a_single_token_has_no_gap() -> None:
    reading = StreamTimings()
    reading.feed(event("stop"), 10.0)
    assert reading.itl_s() is None


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, event(), "the stream ended without a finish_reason"),
        (200, b'data: {"error": {"message": "lost", "code": 500}}\n\n', "lost"),
        (200, b"data: [1]\n\n", "an event of another API"),
        (429, b'{"error": {"message": "the queue\\nis full"}}', "the queue\nis full"),
        (503, b"<html>\nno\n</html>", "<html>\nno\n</html>"),
        (502, b"", "status 502"),
        (404, b'{"detail": "nothing here"}', '{"detail": "nothing here"}'),
    ],
)
def test_what_is_no_whole_answer_says_why(status: int, body: bytes, error: str) -> None:
    reading = StreamTimings()
    reading.feed(body, 1.0)
    reading.end(status)
    assert reading.error.startswith(error)
