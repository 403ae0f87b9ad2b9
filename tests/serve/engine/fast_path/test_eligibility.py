"""Which requests take the fast path."""

from __future__ import annotations

from typing import Any

import pytest

from serve.engine.fast_path.eligibility import CHAT, COMPLETION, FIELDS, NEUTRAL, eligible
from tests.serve.engine.fast_path.corpus import corpus

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_object"}
CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES}),
        (
            CHAT,
            {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "stop": ["a"]},
        ),
        (CHAT, {"messages": MESSAGES, "n": 1, "logprobs": False, "top_logprobs": 0, "tool_choice": "none"}),
        (CHAT, {"messages": MESSAGES, "response_format": SCHEMA, "metadata": {"a": "b"}}),
        (COMPLETION, {"prompt": "hi", "logprobs": None, "echo": False}),
        (COMPLETION, {"prompt": [1, 2, 3]}),
        (COMPLETION, {"prompt": ["hi"]}),
        (COMPLETION, {"prompt": [[1, 2, 3]]}),
    ],
)
def test_what_changes_only_the_text_of_an_event_is_eligible(path: str, body: dict[str, Any]) -> None:
    assert eligible(path, [(b"content-type", b"application/json")], body)
    assert not eligible(path, [(b"origin", b"http://page.invalid")], body)
    assert not eligible(path, [], body | {"a_new_field": 1})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "tools": [{}]}),
        (CHAT, {"messages": MESSAGES, "tool_choice": "auto"}),
        (CHAT, {"messages": MESSAGES, "tool_choice": None}),
        (CHAT, {"messages": MESSAGES, "n": 2}),
        (CHAT, {"messages": MESSAGES, "logprobs": True}),
        (CHAT, {"messages": MESSAGES, "echo": True}),
        (CHAT, {"messages": MESSAGES, "use_beam_search": True}),
        (CHAT, {"messages": MESSAGES, "include_reasoning": False}),
        (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": CONTINUOUS}),
        (COMPLETION, {"prompt": "hi", "logprobs": 0}),
        (COMPLETION, {"prompt": ["hi", "ho"]}),
        (COMPLETION, {"prompt": [[1], [2]]}),
        (COMPLETION, {"prompt_embeds": "x"}),
        (COMPLETION, {"prompt": "hi", "return_token_ids": True}),
        (COMPLETION, []),
        (CHAT, None),
    ],
)
def test_what_adds_fields_choices_or_reads_the_text_is_not(path: str, body: Any) -> None:
    assert not eligible(path, [], body)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_the_contract_with_vllm_sends_every_field(path: str) -> None:
    """Those listed here, and those of vLLM's own model of a request."""
    sent = {name for request in corpus("m", [1]) if request.path == path for name in request.body}
    assert FIELDS[path] | set(NEUTRAL[path]) <= sent


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_the_contract_with_vllm_sends_every_field_of_vllms_requests() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: PLC0415

    for path, model in ((CHAT, ChatCompletionRequest), (COMPLETION, CompletionRequest)):
        sent = {name for request in corpus("m", [1]) if request.path == path for name in request.body}
        assert set(model.model_fields) - sent == set()
