"""The fingerprint is of what the engine reads: what changes in a body, and not in its prompt, is left out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol import body as bodies
from gateway.protocol.canonical_prompt import FIRST_BYTES, MAX_ENDS_OF_MESSAGES, canonical_prompt
from gateway.protocol.json_structure import JsonPieceReader
from gateway.protocol.paths import ROUTES
from gateway.protocol.prompt_features import BytesPerToken, PromptFeatures, seed_of
from serve.engine.sim.chat_template import (
    ChatMessage,
    anthropic_turns,
    chat_turns,
    prompt_of,
    responses_turns,
)
from tests.gateway.protocol.agent_sessions import EPHEMERAL, claude_code, codex, openai_chat

SEED = seed_of("m", "", "")
HEADER = "x-anthropic-billing-header: cc_version=2.1.150.{}; cch={};"
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


def read(path: str, raw: bytes, density: BytesPerToken | None = None) -> PromptFeatures:
    prompt = canonical_prompt(bodies.read(raw), ROUTES[path], raw)
    return (density or BytesPerToken()).read(SEED, prompt, None, 1)


def tokens_of(path: str, raw: bytes) -> list[Any]:
    """The tokens of the prompt that the simulated engine reads, as vLLM does: see test_conversations.py."""
    body = json.loads(raw)
    if path == RESPONSES:
        turns = responses_turns(body["input"], body["instructions"])
    else:
        messages = msgspec.convert(body["messages"], list[ChatMessage])
        turns = chat_turns(messages) if path == CHAT else anthropic_turns(messages, body["system"])
    return list(prompt_of(turns, body["tools"]).tokens)


def shared(one: PromptFeatures, other: PromptFeatures) -> int:
    """The tokens of ``other`` that are believed cached where ``one`` was computed."""
    held = set(one.prefix)
    depth = sum(1 for _ in takewhile(lambda value: value in held, other.prefix))
    return other.depths[depth - 1] if depth else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "session"),
    [(MESSAGES, claude_code), (RESPONSES, codex), (CHAT, openai_chat)],
    ids=["claude_code", "codex", "openai_chat"],
)
def test_what_turns_of_an_agent_share_is_known_to_two_percent(
    path: str, session: Callable[[int], Iterator[bytes]]
) -> None:
    density, before = BytesPerToken(), None
    openings = set()
    for raw in session(40):
        tokens, now = tokens_of(path, raw), read(path, raw, density)
        openings.add(now.opening)
        density.learn(now.prompt_bytes, len(tokens), 100)
        if before is not None:
            former, guess = before
            same = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(former, tokens, strict=False))
            )
            assert shared(guess, now) / now.prompt_tokens == pytest.approx(same / len(tokens), abs=0.02)
        before = tokens, now
    assert len(openings) == 1 and 0 not in openings


def messages(*texts: Any, **more: Any) -> bytes:
    roles = ("user", "assistant")
    listed = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return json.dumps({"model": "m", "max_tokens": 9, "messages": listed, **more}).encode()


def chat(system: Any, **more: Any) -> bytes:
    listed = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
    return json.dumps({"model": "m", "messages": listed, **more}).encode()


def responses(instructions: str) -> bytes:
    return json.dumps({"model": "m", "input": "hi", "instructions": instructions}).encode()


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


LONG = "rules " * 1000
MARK = {"cache_control": EPHEMERAL}
FIRST, SECOND = HEADER.format("a1b", "12345"), HEADER.format("c2d", "67890")


@pytest.mark.parametrize(
    ("path", "one", "other", "equal"),
    [
        # The header is a block of the system prompt, its first line, or in a system message.
        (MESSAGES, *[messages("hi", system=[block(h), block(LONG)]) for h in (FIRST, SECOND)], True),
        (MESSAGES, *[messages("hi", system=f"{h}\n{LONG}") for h in (FIRST, SECOND)], True),
        (CHAT, *[chat(f"{h}\n{LONG}") for h in (FIRST, SECOND)], True),
        (CHAT, *[chat([block(h), block(LONG)]) for h in (FIRST, SECOND)], True),
        (CHAT, *[chat([block(f"{h}\n{LONG}")]) for h in (FIRST, SECOND)], True),
        (RESPONSES, *[responses(f"{h}\n{LONG}") for h in (FIRST, SECOND)], True),
        # It is text where vLLM keeps it: after the line, in other messages, not at the begin.
        (CHAT, *[chat(f"{FIRST}\n{end}{LONG}") for end in "ab"], False),
        (MESSAGES, *[messages(f"{h}\n{LONG}") for h in (FIRST, SECOND)], False),
        (CHAT, *[messages(f"{h}\n{LONG}") for h in (FIRST, SECOND)], False),
        (MESSAGES, *[messages("hi", system=f"A {h}\n{LONG}") for h in (FIRST, SECOND)], False),
        (MESSAGES, *[messages("hi", system=f'A "{h}\n{LONG}') for h in (FIRST, SECOND)], False),
        # Marks of the cache on the last messages.
        (
            MESSAGES,
            messages([block(LONG, **MARK)], [block("b")], [block("c", **MARK)]),
            messages([block(LONG)], [block("b", **MARK)], [block("c", **MARK)]),
            True,
        ),
        (MESSAGES, messages([block(LONG, **MARK)]), messages([block(LONG)]), True),
        (MESSAGES, messages([block(LONG, cache_control=None)]), messages([block(LONG)]), True),
        (
            MESSAGES,
            messages([block(LONG + ',"cache_control": {"a": 1}')]),
            messages([block(LONG + ',"cache_control": {"a": 2}')]),
            False,
        ),
        (CHAT, chat(LONG, metadata={"user_id": "a"}), chat(LONG, metadata={"user_id": "b"}, seed=4), True),
    ],
)
def test_two_bodies_are_one_prompt_if_the_engine_reads_the_same(
    path: str, one: bytes, other: bytes, equal: bool
) -> None:
    a, b = read(path, one), read(path, other)
    assert (a.prefix == b.prefix) is equal
    assert (a.prompt_bytes == b.prompt_bytes) or not equal


def test_a_part_that_is_left_out_has_no_tokens() -> None:
    plain = read(MESSAGES, messages("hi", system=[block(LONG)]))
    headed = read(MESSAGES, messages("hi", system=[block(FIRST), block(LONG)]))
    assert headed.prompt_tokens - plain.prompt_tokens < 10  # of the empty block


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("spaced", [True, False])
def test_the_first_turn_of_a_conversation_is_the_same_in_all_its_requests(path: str, spaced: bool) -> None:
    def opening(*texts: Any, **more: Any) -> int:
        body = json.loads(messages(*texts, **more))
        return read(path, json.dumps(body, separators=None if spaced else (",", ":")).encode()).opening

    tools = {"tools": [{"name": "t", "input_schema": {}}]}
    marked = [block("do it", cache_control=EPHEMERAL)]
    first = opening(marked, **tools)
    assert first != 0
    assert first == opening("do it", "done", "more", **tools) == opening("do it", "done", marked, **tools)
    assert first != opening("do this", "done", "more", **tools)
    assert first != opening("do it", "done", "more")
    assert opening("do it", "done", "more") == opening("do it", "no", "why") != 0
    assert opening("do it") == 0  # a single question


def test_the_system_prompt_is_part_of_the_first_turn() -> None:
    def opening(system: str) -> int:
        return read(MESSAGES, messages("do it", "done", "more", system=system)).opening

    assert opening("a") == opening("a") != opening("b")
    assert opening(LONG + "a") != opening(LONG + "b")


def test_a_text_as_input_is_no_conversation() -> None:
    raw = json.dumps({"model": "m", "input": "hello", "instructions": LONG}).encode()
    found = read(RESPONSES, raw)
    assert found.opening == 0 and found.prompt_bytes > len(LONG)


async def test_a_body_read_in_pieces_has_the_same_fingerprint() -> None:
    *_, raw = claude_code(12)
    large = await bodies.read_large(raw, JsonPieceReader())
    prompt = canonical_prompt(large, ROUTES[MESSAGES], raw)
    found, same = BytesPerToken().read(SEED, prompt, None, 1), read(MESSAGES, raw)
    assert all(getattr(found, name) == getattr(same, name) for name in PromptFeatures.__slots__)


def test_a_body_full_of_marks_is_left_as_it_is_beyond_a_bound() -> None:
    raw = messages(*[[block("x", **MARK)]] * 200)
    prompt = canonical_prompt(bodies.read(raw), ROUTES[MESSAGES], raw)
    assert b"".join(prompt.parts).count(b"cache_control") == 200 - MAX_ENDS_OF_MESSAGES


@pytest.mark.parametrize("turns", [1, 3])
def test_a_first_turn_is_read_up_to_a_bound(turns: int) -> None:
    def opening(text: str) -> int:
        said = [text, *["more"] * (turns - 1)]
        return read(MESSAGES, messages(*said, tools=[{"name": "t"}])).opening

    assert opening("a" * FIRST_BYTES) == opening("a" * FIRST_BYTES + "b") != opening("b" * FIRST_BYTES) != 0


_json = st.recursive(
    st.sampled_from(
        ["", "x-anthropic-billing-header", "cache_control", '"cache_control": null', "\\", 1, None]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "type", "text", "content", "cache_control", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(_json, st.lists(_json, max_size=4), st.sampled_from([CHAT, MESSAGES, RESPONSES]), st.booleans())
def test_any_body_has_a_fingerprint(system: Any, listed: list[Any], path: str, spaced: bool) -> None:
    field = ROUTES[path].prompt or ""
    body = {"model": "m", "system": system, "tools": [], field: listed}
    raw = json.dumps(body, separators=None if spaced else (",", ":")).encode()
    prompt = canonical_prompt(bodies.read(raw), ROUTES[path], raw)
    size = sum(map(len, prompt.parts))
    assert size <= len(raw)
    assert list(prompt.ends) == sorted(prompt.ends) and all(0 <= end <= size for end in prompt.ends)
    assert prompt.head <= size
