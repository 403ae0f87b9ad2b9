"""What multiplies an engine's work is bounded, whichever way a body is read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.body import BodyRules
from gateway.protocol.errors import Refused
from gateway.protocol.validation import engine_work_limits, media
from gateway.protocol.validation.forwarded_fields import KNOWN
from gateway.protocol.validation.regex_size import expanded_size
from tests.gateway.protocol.accepted_body import accepted_body

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ADDED = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "run"}}}
DEFINED = {"role": "system", "content": [ADDED] * 512}
DEEP = "(" * 30_000
LARK = 'start: %json {"type":"string","pattern":"' + DEEP + '"}'
PAGE = Path(__file__).parents[4] / "docs" / "request-limits.md"


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else 1


def nested_content(depth: int) -> Any:
    return {"content": nested_content(depth - 1)} if depth else []


def enumerated(count: int) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {"anyOf": [{"enum": [0] * count}]}}}


# By field: the path, the largest value that passes, one that does not, and what is said of it.
BOUNDS: list[tuple[str, str, Any, Any, str]] = [
    (CHAT, "n", 8, 9, "between 1 and 8, got 9"),
    (TEXT, "best_of", 8, 9, "at most 8, got 9"),
    (TEXT, "logprobs", 20, 21, "at most 20, got 21"),
    (TEXT, "logprobs", True, "21", "must be a number"),
    (CHAT, "top_logprobs", None, 1e9, "at most 20, got 1000000000.0"),
    (CHAT, "top_logprobs", 1, 10**400, "at most 20"),
    (CHAT, "logprob_token_ids", [0] * 20, [0] * 21, "at most 20 tokens, got 21"),
    (CHAT, "logit_bias", {str(i): 1 for i in range(300)}, {str(i): 1 for i in range(301)}, "got 301"),
    (CHAT, "stop", ["a"] * 4, ["a"] * 5, "at most 4 sequences, got 5"),
    (CHAT, "stop", "a" * 4094, "a" * 4095, "at most 4096 bytes, got 4097"),
    (MESSAGES, "stop_sequences", ["a"] * 16, ["a"] * 17, "at most 16 sequences, got 17"),
    (CHAT, "stop_token_ids", [0] * 64, [0] * 65, "at most 64 tokens, got 65"),
    (CHAT, "bad_words", ["a"] * 64, ["a"] * 65, "at most 64 words, got 65"),
    (CHAT, "min_tokens", 10**6, 10**6 + 1, "at most 1000000"),
    (CHAT, "top_k", 10**9, 1 << 64, "at most 2147483647, got 18446744073709551616"),
    (MESSAGES, "top_k", -1, -(1 << 64), "at least -2147483647"),
    (CHAT, "thinking_token_budget", None, 1 << 64, "at most 2147483647"),
    (TEXT, "stream_interval", 5, 1e30, "at most 2147483647"),
    (TEXT, "stop_token_ids", [7], [7, 1 << 64], "at most 2147483647"),
    (TEXT, "logprob_token_ids", [7], ["a"], "must be a number"),
    (CHAT, "repetition_detection", {"max_pattern_size": 128}, {"max_pattern_size": 129}, "at most 128, got"),
    (CHAT, "repetition_detection", {"min_count": 64}, {"min_count": 65}, "min_count must be at most 64"),
    ("/v1/embeddings", "encoding_format", "base64", "bytes", "must be float or base64"),
    (RESPONSES, "metadata", {"a": "b" * 65_000}, {"a": "b" * 66_000}, "at most 65536 bytes"),
    (CHAT, "user", "b" * 65_000, "b" * 66_000, "at most 65536 bytes"),
    (MESSAGES, "messages", [DEFINED], [{**DEFINED, "content": [ADDED] * 513}], "at most 512 tools, got 513"),
    (CHAT, "messages", [{"tools": [{}]}], [{"tools": [{"a": "b" * 65536}]}], "tools.0 takes at most 65536"),
    (CHAT, "messages", [{"tools": []}], [{"tools": [{"a": "b" * 60000}] * 18}], "1048576 bytes of tools"),
    (CHAT, "truncate_prompt_tokens", -1, 1 << 21, "at most 1048576"),
    (CHAT, "tools", [{}] * 512, [{}] * 513, "at most 512 tools, got 513"),
    (CHAT, "tools", [{}], [{"a": "b" * 65536}], "tools.0 takes at most 65536 bytes"),
    (CHAT, "tools", [{}], [{"a": "b" * 60000}] * 18, "tools takes at most 1048576 bytes"),
    (CHAT, "response_format", enumerated(1000), enumerated(1001), "1000 values of enumerations, got 1001"),
    (CHAT, "response_format", nested(32), nested(33), "deeper than 32 levels"),
    (CHAT, "response_format", {"a": "b" * 65000}, {"a": "b" * 66000}, "at most 65536 bytes"),
    (RESPONSES, "text", {"pattern": "a{9}"}, {"format": {"pattern": "(a{99}){999}"}}, "got 98901"),
    (MESSAGES, "output_config", {"effort": "low"}, nested(33), "deeper than 32 levels"),
    (CHAT, "structured_outputs", {"choice": ["a"] * 1000}, {"choice": ["a"] * 1001}, "got 1001"),
    (CHAT, "structured_outputs", {"json": "{}"}, {"json": '{"pattern":"a{99999}"}'}, "10000 characters"),
    (CHAT, "structured_outputs", {"regex": "a{10000}"}, {"regex": "a{10001}"}, "got 10001"),
    (TEXT, "guided_regex", "a" * 4096, "(" * 65_000, "most 4096 characters, this one has 65000"),
    (TEXT, "guided_whitespace_pattern", "a" * 4096, "a" * 4097, "most 4096 characters, this one has 4097"),
    (CHAT, "structured_outputs", {"regex": "a"}, {"regex": DEEP}, "characters, this one has 30000"),
    (CHAT, "response_format", {"pattern": "a"}, {"schema": {"pattern": DEEP}}, "this one has 30000"),
    (CHAT, "response_format", {"patternProperties": {"a": {}}}, {"patternProperties": {DEEP: {}}}, "30000"),
    (RESPONSES, "text", {"pattern": "a"}, {"format": {"schema": {"pattern": DEEP}}}, "this one has 30000"),
    (CHAT, "structured_outputs", {"json": "{}"}, {"json": json.dumps({"pattern": DEEP})}, "has 30000"),
    (CHAT, "structured_outputs", {"grammar": "a: /b/"}, {"grammar": LARK}, "brackets, this one has 30000"),
    (TEXT, "guided_grammar", "start: /b/", LARK, "8192 opening parentheses and brackets"),
    (CHAT, "response_format", {"a": 1}, {"structural_tag": json.dumps({"grammar": LARK})}, "has 30000"),
    (CHAT, "tools", [{"a": "(" * 8191 + "a"}], [{"a": DEEP}], "tools.0 takes at most 8192 opening"),
    (CHAT, "structured_outputs", None, [], "must be an object"),
    (TEXT, "guided_choice", ["a"] * 1000, ["a"] * 1001, "got 1001"),
    (CHAT, "chat_template_kwargs", {"a": 1}, {"chat_template": "x"}, "is not accepted"),
    (CHAT, "messages", [{}] * 10_000, [{}] * 10_001, "10000"),
    (CHAT, "messages", [{"content": [""] * 9_999}], [{"content": [""] * 10_000}], "10000"),
    (CHAT, "messages", [{"content": {"content": {}}}], [nested_content(9)], "deeper than 4 levels"),
    (RESPONSES, "input", "a", [{}] * 10_001, "10000"),
    (RESPONSES, "include", ["a"], ["a"] * 17, "at most 16 fields, got 17"),
    (TEXT, "prompt", ["a"] * 2048, ["a"] * 2049, "at most 2048 inputs, got 2049"),
    (TEXT, "prompt", [1] * 5000, [[1]] * 2049, "at most 2048 inputs, got 2049"),
    ("/v1/embeddings", "input", ["a"] * 2048, ["a"] * 2049, "at most 2048 inputs, got 2049"),
    ("/v1/score", "text_2", ["a"] * 2048, ["a"] * 2049, "at most 2048 inputs, got 2049"),
    ("/v1/rerank", "documents", ["a"] * 2048, [{}] * 2049, "at most 2048 inputs, got 2049"),
    (CHAT, "documents", [{}] * 2048, [{}] * 2049, "at most 2048 inputs, got 2049"),
    ("/v1/detokenize", "tokens", [1] * 1000, ["a" * 2_100_000], "at most 2097152 bytes"),
]  # fmt: skip


@pytest.mark.parametrize("padding", [0, 300_000])
@pytest.mark.parametrize(("path", "name", "good", "bad", "message"), BOUNDS)
def test_bounds(  # noqa: PLR0917
    path: str, name: str, good: Any, bad: Any, message: str, padding: int
) -> None:
    base = {"model": "m", "filler": "a" * padding}
    assert accepted_body({**base, name: good}, path).dropped == []
    with pytest.raises(Refused, match=re.escape(message)) as refused:
        accepted_body({**base, name: bad}, path)
    assert (refused.value.status, str(refused.value.param).split(".")[0]) == (400, name)
    assert len(refused.value.body()) <= 4096


@pytest.mark.parametrize(
    ("path", "fields", "wants"),
    [
        (TEXT, {"echo": True, "logprobs": 0}, True),
        (TEXT, {"echo": True, "logprobs": False}, True),  # which vLLM reads as 0
        (TEXT, {"echo": 1, "logprob_token_ids": [1]}, True),
        (TEXT, {"echo": True, "logprobs": None}, False),
        (CHAT, {"echo": True, "logprobs": False, "top_logprobs": 0}, False),
        (CHAT, {"echo": True, "logprobs": True}, True),
        (TEXT, {"echo": False, "logprobs": 1}, False),
        (TEXT, {"logprobs": 1}, False),
    ],
)
def test_an_echo_with_logprobs_wants_those_of_the_prompt(
    path: str, fields: dict[str, Any], wants: bool
) -> None:
    members = accepted_body({"model": "m", **fields}, path).body.members
    assert engine_work_limits.wants_prompt_logprobs(members, path) is wants


@pytest.mark.parametrize("padding", [0, 300_000])
def test_the_schemas_of_a_request_take_no_more_time_together_than_one(padding: int) -> None:
    names: list[str] = [name for name in engine_work_limits.SCHEMAS if name in KNOWN[CHAT]]
    assert len(names) > 5
    base: dict[str, Any] = {"model": "m", "filler": "a" * padding}
    schema = {"x": "a" * (65_536 // len(names) - 10)}
    all_ = {**base, **dict.fromkeys(names, schema)}
    accepted_body(all_, CHAT)
    message = f"{names[-1]} takes at most 65536 bytes together with the other schemas, got 65..."
    with pytest.raises(Refused, match=message):
        accepted_body({**all_, names[-1]: {"x": schema["x"] + "a" * 20}}, CHAT)
    accepted_body({**all_, "text": "a" * 65_536}, CHAT, BodyRules(extra_fields=frozenset({"text"})))


def test_the_page_has_the_bounds() -> None:
    page = PAGE.read_text()
    found = [
        value
        for module in (engine_work_limits, media)
        for name, value in vars(module).items()
        if name.startswith("MAX_") and name != "MAX_DEPTH"
    ]
    assert [value for value in found if f"{value:,}" not in page] == []


def test_many_unknown_fields_are_refused_at_once() -> None:
    body = {"model": "m", **{str(i): 0 for i in range(1024)}}
    with pytest.raises(Refused, match="more than 1024 members"):
        accepted_body(body)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0), ("abc", 3), (r"\d{4}-\d{2}", 7), ("[^]a-z]{3}", 3), ("(ab){3}c", 7), ("(a{10}){10}", 100),
        ("((a{9}b){9}c){9}", 819), ("a{2,5}", 5), ("a{7,}", 7), ("a{x}", 4), (r"a\{9}", 4), ("(|a)*", 1),
        ("{9}", 3), ("a{0}", 1), ("(?:ab){2}", 4), ("(?P<x>a){3}", 3), ("a{99999999999}", 1 << 40),
        ("a{%s9}" % ("0" * 99), 1 << 40), ("a(?i)b", 2), ("a(b{9}", 10),
    ],
)  # fmt: skip
def test_a_regular_expression_is_as_large_as_it_is_written_out(pattern: str, size: int) -> None:
    assert expanded_size(pattern) == size


@given(st.text(st.sampled_from("a()[]{}\\,09^|*")))
def test_no_text_breaks_the_measure(pattern: str) -> None:
    assert expanded_size(pattern) >= 0
