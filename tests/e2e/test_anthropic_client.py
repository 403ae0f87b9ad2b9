"""What users of the official Anthropic client get from a real model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600, func_only=True)]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
# The client has no temperature of its own any more.
GREEDY = {"temperature": 0}
ASK: dict[str, Any] = {"model": CHAT, "messages": QUESTION, "max_tokens": 16, "extra_body": GREEDY}


@pytest.fixture(scope="module")
def claude(stack: Stack) -> Iterator[anthropic.Anthropic]:
    url = stack.base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=300) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_a_stream_adds_up_to_the_message(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        deltas = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(deltas) > 1 and "Paris" in text_of(whole)
    assert "".join(deltas) == text_of(final) == text_of(whole)
    assert final.stop_reason == "end_turn"
    assert final.usage == whole.usage
    kinds = [event.type for event in claude.messages.create(**ASK, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def test_a_system_prompt_counts_as_input(claude: anthropic.Anthropic) -> None:
    plain = claude.messages.create(**ASK)
    with_system = claude.messages.create(**ASK, system="Answer with one word.")
    assert with_system.usage.input_tokens != plain.usage.input_tokens
    blocks = claude.messages.create(**ASK, system=[{"type": "text", "text": "Answer with one word."}])
    assert blocks.usage.input_tokens == with_system.usage.input_tokens
    assert text_of(blocks) == text_of(with_system)


def test_tokens_are_counted_as_the_message_counts_them(claude: anthropic.Anthropic) -> None:
    header = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.150.a1b; cch=12345;"}
    prompt: dict[str, Any] = {"model": CHAT, "messages": QUESTION}
    for system in (anthropic.omit, "Answer with one word.", [header]):
        counted = claude.messages.count_tokens(**prompt, system=system).input_tokens
        assert counted == claude.messages.create(**ASK, system=system).usage.input_tokens
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.count_tokens(**{**prompt, "model": "nobody"})
    assert unknown.value.body == {"type": "error", "error": unknown.value.body["error"]}  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"stop_sequences": ["Paris"]}, "stop_sequence"), ({"max_tokens": 3}, "max_tokens")],
)
def test_every_stop_reason_is_set(claude: anthropic.Anthropic, change: dict[str, Any], reason: str) -> None:
    answer = claude.messages.create(**{**ASK, **change})
    assert answer.stop_reason == reason
    assert "Paris" not in text_of(answer)
    with claude.messages.stream(**{**ASK, **change}) as stream:
        assert stream.get_final_message().stop_reason == reason


def test_a_required_tool_call_has_its_arguments(claude: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = claude.messages.create(
        **ASK | {"max_tokens": 80},
        tools=[{"name": "get_weather", "input_schema": schema, "strict": True}],
        tool_choice={"type": "any"},
    )
    assert answer.stop_reason == "tool_use"
    (block,) = answer.content
    assert block.type == "tool_use"
    assert block.name == "get_weather"
    assert block.input["city"] in ("Paris", "Rome")
