"""Features of a prompt: equal beginnings give equal hashes, and lengths are in tokens."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol import body as bodies
from gateway.protocol.canonical_prompt import CanonicalPrompt, canonical_prompt
from gateway.protocol.paths import ROUTES
from gateway.protocol.prompt_features import (
    BLOCK_BYTES,
    BOUNDARIES,
    COUNTED_BYTES,
    BytesPerToken,
    PromptFeatures,
    adapter_key,
    limit_of,
    seed_of,
    token_ids,
)

SEED = seed_of("m", "", "")


def fingerprint(route: str = "/v1/chat/completions", seed: int = SEED, **fields: Any) -> PromptFeatures:
    raw = json.dumps({"model": "m", **fields}).encode()
    body = bodies.read(raw)
    return BytesPerToken().read(
        seed, canonical_prompt(body, ROUTES[route], raw), limit_of(body), body.choices
    )


def chat(system: str, user: str, **fields: Any) -> PromptFeatures:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return fingerprint(messages=messages, **fields)


def common(one: PromptFeatures, other: PromptFeatures) -> int:
    """Tokens of the beginning that two prompts are known to share."""
    depth = 0
    for i, (a, b) in enumerate(zip(one.prefix, other.prefix, strict=False)):
        if a != b:
            break
        depth = min(one.depths[i], other.depths[i])
    return depth


def test_a_shared_system_prompt_is_found_to_within_a_block() -> None:
    system = "You are terse. " * 280
    shared = common(chat(system, "one " * 300), chat(system, "two " * 300))
    assert (len(system) - BLOCK_BYTES) / 4 <= shared <= (len(system) + 64) / 4


def test_short_prompts_have_no_prefix() -> None:
    short = chat("", "hello")
    assert short.prefix == short.depths == ()
    assert 5 <= short.prompt_tokens <= 40


@pytest.mark.parametrize("other", [seed_of("n", "", ""), seed_of("m", "a", ""), seed_of("m", "", "t")])
def test_models_adapters_and_tenants_share_no_prefix(other: int) -> None:
    text = "x" * 4000
    here = fingerprint("/v1/completions", prompt=text)
    there = fingerprint("/v1/completions", seed=other, prompt=text)
    assert not set(here.prefix) & set(there.prefix)


def test_hashes_are_even_and_adapters_odd() -> None:
    assert all(value % 2 == 0 for value in chat("s" * 9000, "u").prefix)
    assert adapter_key("m", "a") % 2 == 1 and adapter_key("m", "a") != adapter_key("m", "b")


def test_tools_and_system_come_before_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 2000}}]
    one, other = chat("s", "one " * 400, tools=tools), chat("s", "two " * 400, tools=tools)
    assert common(one, other) >= 400
    assert common(one, chat("s", "one " * 400)) == 0
    messages = [{"role": "user", "content": "hello " * 300}]
    first = fingerprint("/v1/messages", system="s" * 3000, messages=messages)
    second = fingerprint(
        "/v1/messages", system="s" * 3000, messages=[{"role": "user", "content": "bye " * 300}]
    )
    assert common(first, second) >= 600


def test_a_continued_conversation_keeps_its_prefix() -> None:
    turns = [
        {"role": "user", "content": "question " * 200},
        {"role": "assistant", "content": "answer " * 200},
    ]
    longer = [*turns, {"role": "user", "content": "more " * 200}]
    before, after = fingerprint(messages=turns), fingerprint(messages=longer)
    assert common(before, after) >= before.depths[-2]


def test_token_ids_are_counted_and_not_estimated() -> None:
    ids = list(range(1000, 3000))
    exact = fingerprint("/v1/completions", prompt=ids)
    assert exact.prompt_tokens == 2000
    assert exact.depths[-1] <= 2000
    assert token_ids(memoryview(b"[[1, 2], [3]]")) == 3
    assert token_ids(memoryview(b'["1, 2", "3"]')) == 0
    many = json.dumps(ids * 300).encode()
    assert len(many) > COUNTED_BYTES
    assert token_ids(memoryview(many)) == pytest.approx(600_000, rel=0.01)


def test_pooling_prompts_have_a_length_and_no_prefix() -> None:
    pooled = fingerprint("/v1/embeddings", seed=0, input=["x" * 4000])
    assert pooled.prefix == () and pooled.prompt_tokens == pytest.approx(1000, rel=0.02)


def test_the_assumed_answer_length_is_the_maximum_of_the_request() -> None:
    assert chat("", "x", max_tokens=5).output_tokens == 5
    assert chat("", "x", max_completion_tokens=7, n=3).output_tokens == 21
    assert chat("", "x").output_tokens == 128


def test_predicted_lengths_follow_the_counts_of_engines() -> None:
    density = BytesPerToken()
    text = CanonicalPrompt([memoryview(b"x" * 3000)])
    for _ in range(300):
        density.learn(density.read(SEED, text, None, 1).prompt_bytes, 1000, 40)
    assert density.read(SEED, text, None, 1).prompt_tokens == pytest.approx(1000, rel=0.02)
    assert density.answers.mean == pytest.approx(40, rel=0.02)


@pytest.mark.parametrize(("counted", "most"), [(40, 16.0), (10**6, 1.0)])
def test_predicted_lengths_stay_possible_whatever_engines_count(counted: int, most: float) -> None:
    density = BytesPerToken()
    for _ in range(300):
        density.learn(3000, counted, 40)
    assert density.bytes_a_token == pytest.approx(most, rel=0.02)


@given(
    st.binary(min_size=0, max_size=9000),
    st.lists(st.integers(0, 9000), max_size=3),
    st.integers(1, 2**64 - 1),
)
def test_hashes_do_not_depend_on_the_parts_of_a_prompt(text: bytes, cuts: list[int], seed: int) -> None:
    ends = sorted(min(cut, len(text)) for cut in cuts)
    view = memoryview(text)
    parts = [view[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    density = BytesPerToken()
    whole = density.read(seed, CanonicalPrompt([view]), 1, 1)
    assert density.read(seed, CanonicalPrompt(parts), 1, 1).prefix == whole.prefix


def test_a_long_prompt_has_few_boundaries() -> None:
    assert sum(end <= 240 * 1024 for end in BOUNDARIES) <= 48
    gaps = [b / a for a, b in pairwise(BOUNDARIES[7:])]
    assert max(gaps) < 1.2


def test_a_request_for_no_tokens_has_a_limit() -> None:
    """With `echo` engines compute one."""
    assert fingerprint("/v1/completions", prompt="a", echo=True, max_tokens=0).limit_tokens == 1
    assert fingerprint("/v1/completions", prompt="a", max_tokens=None).limit_tokens == 0


def test_a_limit_is_no_more_than_any_answer_has() -> None:
    assert fingerprint(messages=[], max_tokens=(1 << 64) - 1).limit_tokens == 1 << 20
