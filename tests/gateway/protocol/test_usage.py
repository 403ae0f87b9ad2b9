"""The usage of an answer, by engine and API."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.usage import MAX_DECODED, Usage, read_usage, usage_of_answer

COUNTS = {"prompt_tokens": 5, "total_tokens": 7, "completion_tokens": 2}


@pytest.mark.parametrize("size", [10, MAX_DECODED, 4 * MAX_DECODED])
@given(st.sampled_from(["", '"usage":{"prompt_tokens":1}', "\\", "é}{"]), st.booleans())
def test_usage_is_found_at_the_end_of_an_answer(size: int, text: str, spaced: bool) -> None:
    answer = {"text": text * 9 + "x" * size + text, "usage": COUNTS, "kv_transfer_params": None, "y": text}
    raw = json.dumps(answer, indent=1 if spaced else None, ensure_ascii=False).encode()
    assert usage_of_answer(raw) == Usage(5, 0, 2)
    if size > 1000:
        assert usage_of_answer(raw[-MAX_DECODED:]) == Usage(5, 0, 2)


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b'{"usage":null}', b'{"usage":7}', b'{"usage":{}}', b"\xff", b'"usage":{']
)
def test_an_answer_without_usage_has_none(raw: bytes) -> None:
    assert usage_of_answer(raw) is None


def test_usage_without_output_tokens() -> None:
    assert read_usage(b'{"prompt_tokens":8,"total_tokens":8}') == Usage(8, 0, 0)


def test_cached_tokens_are_a_part_of_the_prompt_tokens() -> None:
    assert read_usage(b'{"prompt_tokens":8,"prompt_tokens_details":{"cached_tokens":6}}') == Usage(8, 6, 0)
    assert read_usage(b'{"prompt_tokens":8,"prompt_tokens_details":null}') == Usage(8, 0, 0)
