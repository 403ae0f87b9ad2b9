"""The usage of an answer, by engine and API."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol import body as bodies
from gateway.protocol.canonical_prompt import canonical_prompt
from gateway.protocol.paths import ROUTES
from gateway.protocol.prompt_features import BytesPerToken, seed_of
from gateway.protocol.usage import (
    MAX_USAGE_BYTES,
    MOST_TYPES,
    TokenUsage,
    UsageBounds,
    event_tokens,
    read_usage,
    usage_inside,
    usage_of_answer,
)
from policy.request import Request
from tests.gateway.protocol.accepted_body import accepted_body

COUNTS = {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2}


@pytest.mark.parametrize("size", [10, MAX_USAGE_BYTES, 4 * MAX_USAGE_BYTES])
@given(st.sampled_from(["", '"usage":{"prompt_tokens":1}', "\\", "é}{"]), st.booleans())
def test_usage_is_found_at_the_end_of_an_answer(size: int, text: str, spaced: bool) -> None:
    answer = {"text": text * 9 + "x" * size + text, "usage": COUNTS, "kv_transfer_params": None, "y": text}
    raw = json.dumps(answer, indent=1 if spaced else None, ensure_ascii=False).encode()
    assert usage_of_answer(raw) == usage_inside(raw) == TokenUsage(5, 0, 2)
    if size > 1000:
        assert usage_of_answer(raw[-MAX_USAGE_BYTES:]) == TokenUsage(5, 0, 2)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b'{"usage":null}', b'{"usage":7}', b'{"usage":{}}', b"\xff", b'"usage":{']
)
def test_an_answer_without_usage_has_none(raw: bytes) -> None:
    assert usage_of_answer(raw) is None


def test_usage_without_output_tokens() -> None:
    assert read_usage(b'{"prompt_tokens":8,"total_tokens":8}') == TokenUsage(8, 0, 0)


def test_cached_tokens_are_a_part_of_the_prompt_tokens() -> None:
    assert read_usage(b'{"prompt_tokens":8,"prompt_tokens_details":{"cached_tokens":6}}') == TokenUsage(
        8, 6, 0
    )
    assert read_usage(b'{"prompt_tokens":8,"prompt_tokens_details":null}') == TokenUsage(8, 0, 0)


TEXT, CHAT = "x" * 4000, ROUTES["/v1/chat/completions"]


@pytest.mark.parametrize(
    ("usage", "events", "more", "contradiction"),
    [
        (TokenUsage(1000, 0, 50), 50, {}, ""),
        (TokenUsage(1000, 1000, 0), 0, {}, ""),
        (TokenUsage(32, 0, 50), 50, {}, ""),
        (TokenUsage(10, 0, 50), 50, {}, "prompt"),
        (TokenUsage(-1, 0, 50), 50, {}, "prompt"),
        (TokenUsage(4000 + 300, 0, 50), 50, {}, ""),
        (TokenUsage(10_000, 0, 50), 50, {}, "prompt"),
        (TokenUsage(10_000, 0, 50), 50, {"mm": [{"type": "image_url"}]}, ""),
        (TokenUsage(1000, 1001, 50), 50, {}, "cached"),
        (TokenUsage(1000, -1, 50), 50, {}, "cached"),
        (TokenUsage(1000, 0, 8), 50, {}, ""),
        (TokenUsage(1000, 0, 5), 50, {}, "completion"),
        (TokenUsage(1000, 0, -1), 0, {}, "completion"),
        (TokenUsage(1000, 0, 100), 100, {"max_tokens": 50}, "completion"),
        (TokenUsage(1000, 0, 100), 100, {"max_tokens": 50, "n": 2}, ""),
        (TokenUsage(1000, 0, 8192), 100, {}, ""),
        (TokenUsage(1000, 0, 8193), 100, {}, "completion"),
    ],
)
def test_counts_that_contradict_their_request(
    usage: TokenUsage, events: int, more: dict[str, Any], contradiction: str
) -> None:
    raw = json.dumps({"model": "m", "messages": [{"role": "user", "content": TEXT}], **more}).encode()
    body = bodies.read(raw)
    prompt = BytesPerToken().read(seed_of("m", "", ""), canonical_prompt(body, CHAT, raw), None, 1)
    request = Request(
        "m", prompt_tokens=prompt.prompt_tokens, output_tokens=99, prompt_bytes=prompt.prompt_bytes
    )
    bounds = UsageBounds(request, body, raw, max_model_len=8192)
    assert bounds.contradiction(usage, events) == contradiction
    assert bounds.estimate(events) == TokenUsage(prompt.prompt_tokens, 0, events or 99, exact=False)


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        ({"input": "x" * 4000}, 31),
        ({"input": ["x" * 3000, "x" * 1000]}, 31),
        ({"text_1": "x" * 2000, "text_2": ["x" * 2000]}, 31),
        ({"query": "x" * 2000, "documents": ["x" * 2000]}, 31),
        ({"prompt": "x" * 400}, 3),
        ({"prompt": "hello"}, 0),
        ({"prompt": "hello", "user": "x" * 4000}, 0),
        ({"messages": [], "documents": ["x" * 4000]}, 0),
        ({"input": "x" * 4000, "truncate_prompt_tokens": 10}, 0),
        ({"input": "x" * 4000, "truncate_prompt_tokens": None}, 31),
        ({"input": [[1000000] * 4000]}, 0),
        ({"messages": [{"content": [{"type": "image_url"}]}], "system": "x" * 4000}, 0),
    ],
)
def test_no_text_has_fewer_tokens_than_it_can(fields: dict[str, Any], least: int) -> None:
    raw = json.dumps({"model": "m", **fields}).encode()
    bounds = UsageBounds(Request("m"), bodies.read(raw), raw, max_model_len=None)
    assert bounds.contradiction(TokenUsage(least), 0) == ""
    assert not least or bounds.contradiction(TokenUsage(least - 1), 0) == "prompt"


class Searched(bytes):
    """A body that counts its searches."""

    searches = 0

    def __contains__(self, part: object) -> bool:
        self.searches += 1
        return super().__contains__(part)  # type: ignore[operator]

    def find(self, *given: Any) -> int:
        self.searches += 1
        return super().find(*given)


@pytest.mark.parametrize(
    ("more", "searches"),
    [
        ({}, 1),
        ({"tools": [{"type": "function"}]}, 2),
        ({"x": '"typ' * 9999}, 1),
        ({"x": ["type"] * 9999}, MOST_TYPES),
    ],
)
def test_a_body_is_searched_seldom_for_what_has_no_tokens_in_it(more: dict[str, Any], searches: int) -> None:
    plain = json.dumps({"model": "m", "prompt": TEXT, **more}).encode()
    raw, body = Searched(plain), bodies.read(plain)
    bounds = UsageBounds(Request("m", prompt_tokens=1000, prompt_bytes=4000), body, raw, max_model_len=8192)
    assert bounds.contradiction(TokenUsage(10, 0, 50), 50) == ("" if searches == MOST_TYPES else "prompt")
    assert raw.searches == searches


def test_a_medium_without_a_type_may_have_any_number_of_tokens() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":[{"image_url":"data:"}]}]}'
    body = bodies.read(raw)
    body.media = 1
    bounds = UsageBounds(Request("m", prompt_tokens=10, prompt_bytes=0), body, raw, max_model_len=8192)
    assert bounds.contradiction(TokenUsage(8000, 0, 50), 50) == ""


@pytest.mark.parametrize("path", ["/v1/score", "/v1/rerank"])
def test_each_pair_that_is_scored_may_have_the_query(path: str) -> None:
    query, documents = ("query", "documents") if path == "/v1/rerank" else ("text_1", "text_2")
    content = {"model": "m", query: "word " * 800, documents: ["a"] * 2000}
    accepted = accepted_body(content, path)
    bounds = UsageBounds(Request("m"), accepted.body, accepted.raw, max_model_len=1024)
    assert bounds.contradiction(TokenUsage(2000 * 804), 0) == ""
    assert bounds.contradiction(TokenUsage(2000 * 20_000), 0) == "prompt"


@pytest.mark.parametrize(
    ("fields", "events", "tokens"),
    [
        ({}, 10, 10),
        ({"stream_interval": 1}, 10, 10),
        ({"stream_interval": 100}, 0, 0),
        ({"stream_interval": 100}, 10, 901),
        ({"stream_interval": 100, "n": 2}, 10, 802),
        ({"stream_interval": 100, "max_tokens": 500}, 10, 500),
        ({"stream_interval": None}, 10, 10),
    ],
)
def test_an_event_may_have_several_tokens(fields: dict[str, Any], events: int, tokens: int) -> None:
    counted = event_tokens(bodies.read(json.dumps({"model": "m", **fields}).encode()))
    assert (events if counted is None else counted.of(events)) == tokens
