"""What a stream says and when, however the network cuts it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.stream_reader import Reading, Stream


def chunk(text: str = "", finish: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def event(said: object) -> bytes:
    return b"data: " + json.dumps(said).encode() + b"\n\n"


USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}})
ANSWER = [chunk("a"), chunk("b"), chunk("c", "stop"), USAGE, b"data: [DONE]\n\n"]


def test_each_read_has_its_moment() -> None:
    stream = Stream()
    for at, part in zip((1.0, 1.5, 2.0, 2.25, 2.5), ANSWER, strict=True):
        stream.feed(part, at)
    assert (stream.first_at, stream.finished_at) == (1.0, 2.0)
    assert stream.gaps == [0.5, 0.5, 0.25, 0.25]
    # Two tokens after the first; what follows the finish reason is no token.
    assert stream.mean_itl_s() == 0.5
    assert (stream.finish_reason, stream.prompt_tokens, stream.tokens, stream.error) == ("stop", 7, 3, "")


@given(st.lists(st.integers(1, 400), max_size=12))
def test_a_stream_says_the_same_however_it_is_cut(cuts: list[int]) -> None:
    whole = b"".join(ANSWER)
    edges = [0, *sorted({cut for cut in cuts if cut < len(whole)}), len(whole)]
    stream = Stream()
    for at, (start, end) in enumerate(itertools.pairwise(edges)):
        stream.feed(whole[start:end], float(at))
    assert (stream.events, stream.finish_reason, stream.tokens, stream.error) == (5, "stop", 3, "")
    assert stream.first_at is not None
    # The blank line after the last event may come in a read of its own.
    last = next(at for at, end in enumerate(edges[1:]) if end >= len(whole) - 1)
    assert stream.first_at + sum(stream.gaps) == last


def test_half_an_event_and_a_comment_are_not_a_first_token() -> None:
    stream = Stream()
    stream.feed(b": waiting\n\n" + ANSWER[0][:20], 1.0)
    assert stream.first_at is None
    stream.feed(ANSWER[0][20:], 2.0)
    assert (stream.first_at, stream.gaps) == (2.0, [])


def test_lines_may_end_in_carriage_returns() -> None:
    stream = Stream()
    stream.feed(b"".join(ANSWER).replace(b"\n", b"\r\n"), 1.0)
    assert (stream.finish_reason, stream.tokens) == ("stop", 3)


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (b'{"error": {"message": "lost", "code": "replica_lost"}}', "lost"),
        (b'{"error": "plain"}', "plain"),
        (b"<html>", "not an answer of this API"),
    ],
)
def test_what_went_wrong_is_said(payload: bytes, error: str) -> None:
    stream = Stream()
    stream.feed(ANSWER[0] + b"data: " + payload + b"\n\n", 1.0)
    assert stream.error.startswith(error)
    assert stream.finish_reason is None


def test_a_whole_answer_has_its_usage() -> None:
    said = Reading()
    said.take(b'{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":5,"completion_tokens":9}}')
    assert (said.finish_reason, said.prompt_tokens, said.tokens) == ("length", 5, 9)


def test_one_token_has_no_time_between_tokens() -> None:
    stream = Stream()
    stream.feed(chunk("a", "length"), 1.0)
    assert stream.mean_itl_s() == 0.0
