"""Eligibility for the fast path; vLLM's own app serves all other requests.

The events of such a stream differ in nothing but the text. What adds fields to each of them, makes several
choices, or reads the text (tools, reasoning) is therefore not listed here, and neither is what this version
of Tidegate does not know.
"""

from __future__ import annotations

from typing import Any

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def _names(*lists: str) -> frozenset[str]:
    return frozenset(name for names in lists for name in names.split())


_SAMPLING = """
    model max_tokens min_tokens temperature top_p top_k min_p seed stop stop_token_ids ignore_eos
    include_stop_str_in_output presence_penalty frequency_penalty repetition_penalty length_penalty
    logit_bias bad_words allowed_token_ids skip_special_tokens spaces_between_special_tokens
    truncate_prompt_tokens truncation_side add_special_tokens structured_outputs response_format
    repetition_detection stream stream_options stream_interval cache_salt priority request_id session_id
"""
# What vLLM leaves alone.
_IGNORED = """
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention
    prompt_cache_options moderation best_of early_stopping
"""
FIELDS = {
    CHAT: _names(
        _SAMPLING,
        _IGNORED,
        "messages max_completion_tokens add_generation_prompt continue_final_message documents",
        "chat_template_kwargs reasoning_effort parallel_tool_calls prediction modalities verbosity",
    ),
    COMPLETION: _names(_SAMPLING, _IGNORED, "prompt"),
}
# Other fields may be present with a value that asks for nothing.
NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    CHAT: {
        "n": (None, 1), "echo": (False,), "logprobs": (None, False), "top_logprobs": (None, 0),
        "tools": (None,), "tool_choice": ("none",), "return_token_ids": (None, False),
    },
    COMPLETION: {
        "n": (1,), "echo": (False,), "logprobs": (None,), "suffix": (None,),
        "return_token_ids": (None, False),
    },
}  # fmt: skip
# A page of another origin, and load metrics in the answer's head.
_HEADERS = frozenset({b"origin", b"endpoint-load-metrics-format"})


def eligible(path: str, headers: list[tuple[bytes, bytes]], body: Any) -> bool:
    """Whether the fast path knows the request with the decoded ``body``, which may be of any type."""
    fields, neutral = FIELDS[path], NEUTRAL[path]
    if not isinstance(body, dict) or not _HEADERS.isdisjoint(name for name, _ in headers):
        return False
    for name, value in body.items():
        if name not in fields and (name not in neutral or value not in neutral[name]):
            return False
    options = body.get("stream_options")
    if isinstance(options, dict) and options.get("continuous_usage_stats"):
        return False
    return path == CHAT or _single(body.get("prompt"))


def _single(prompt: Any) -> bool:
    """Whether ``prompt`` is one text or one list of tokens."""
    if isinstance(prompt, list):
        return len(prompt) == 1 or all(isinstance(each, int) for each in prompt)
    return isinstance(prompt, str)
