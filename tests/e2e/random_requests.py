"""Random requests: combinations of the parameters of every endpoint, valid and invalid, from a seed."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

Values = dict[str, list[Any]]

# The vocabulary of the bundled model.
TOKENS = 49_152
MAX_PARAMETERS = 8
# The share of parameters with an invalid value: most requests should reach the engine.
INVALID_SHARE = 0.04

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look it up.", "parameters": SCHEMA}}
WORDS = "tide comes in over the sand and the moon pulls at the sea while boats wait for water"
TEXTS = ["x", "\n", "é漢字🌊", WORDS, f"{WORDS} " * 8, "<|im_start|>user\n" * 9]
# It allows no token, not even the end.
DEAD_END = {"grammar": "root ::= root"}

SAMPLING: Values = {
    "temperature": [0, 1e-9, 0.1, 1.0, 2.0], "top_p": [0.01, 0.9, 1.0], "top_k": [-1, 0, 1, 40, 10**9],
    "min_p": [0.0, 0.2, 1.0], "seed": [0, 7, -1, 2**62], "presence_penalty": [-2.0, 1.5],
    "frequency_penalty": [-2.0, 1.5], "repetition_penalty": [0.01, 1.2, 100.0],
    "logit_bias": [{"5": 100}, {"0": -100, str(TOKENS - 1): 3}], "stop": ["e", ["tide", "\n"]],
    "stop_token_ids": [[0], [2, TOKENS - 1]], "include_stop_str_in_output": [True], "ignore_eos": [True],
    "skip_special_tokens": [False],
    "structured_outputs": [
        {"json": SCHEMA}, {"json": {"type": "array", "minItems": 3}}, {"json_object": True},
        {"regex": "[ab]{1,9}"}, {"choice": ["yes", "no"]}, {"grammar": 'root ::= "a" root | "b"'}, DEAD_END,
    ],
    "stream": [True, False], "cache_salt": ["x"], "watermarking": [False], "session_id": ["s"], "user": ["u"],
    "mm_payload": ["none"], "return_mm_kwargs": [False],
}  # fmt: skip
GENERATION: Values = SAMPLING | {
    "n": [1, 2, 8], "min_tokens": [1, 5], "max_tokens": [1, 8, 30], "bad_words": [["the", "sea"]],
    "spaces_between_special_tokens": [False], "truncate_prompt_tokens": [-1, 1, 5],
    "truncation_side": ["left", "right"], "logprob_token_ids": [[5], [1, 1, 2]], "length_penalty": [2.0],
    "add_special_tokens": [True, False], "return_tokens_as_token_ids": [True], "return_token_ids": [True],
    "repetition_detection": [{"max_pattern_size": 3, "min_count": 2}], "stream_interval": [1, 5],
    "routed_experts_prompt_start": [0], "return_token_offsets": [True], "thinking_token_budget": [None],
    "echo": [True],
    "response_format": [
        {"type": "json_object"}, {"type": "text"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    ],
    "stream_options": [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}],
}  # fmt: skip
COMPLETION: Values = GENERATION | {"logprobs": [0, 1, 20], "suffix": [None]}
CHAT: Values = GENERATION | {
    "logprobs": [True], "top_logprobs": [0, 1, 20], "max_completion_tokens": [1, 8, 30],
    "tools": [[TOOL], [TOOL] * 2],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "look"}}],
    "parallel_tool_calls": [False], "reasoning_effort": ["low", "none"], "include_reasoning": [False],
    "add_generation_prompt": [False], "continue_final_message": [True],
    "documents": [[{"title": "a", "text": "b"}]], "chat_template_kwargs": [{"enable_thinking": False}],
}  # fmt: skip
RESPONSE: Values = SAMPLING | {
    "max_output_tokens": [1, 8, 30], "instructions": ["Be brief."], "metadata": [{"a": "b"}],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"]], "top_logprobs": [0, 5],
    "parallel_tool_calls": [False], "service_tier": ["auto"], "store": [False, True],
    "truncation": ["disabled"],
    "text": [{"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}], "max_tool_calls": [1],
    "tools": [[{"type": "function", "name": "look", "parameters": SCHEMA}]],
    "tool_choice": ["auto", "required", "none", {"type": "function", "name": "look"}],
    "reasoning": [{"effort": "low"}], "include_reasoning": [False], "prompt_cache_key": ["k"],
    "enable_response_messages": [True], "previous_input_messages": [[{"role": "user", "content": "x"}]],
    "prompt": [None], "stream_options": [{"include_obfuscation": False}],
    "chat_template_kwargs": [{"enable_thinking": False}], "context_management": [[{"type": "compaction"}]],
}  # fmt: skip
MESSAGE: Values = {
    "stop_sequences": [["e"], ["tide", "\n"]], "max_tokens": [1, 8, 30], "metadata": [{"user_id": "u"}],
    "system": ["Be brief.", [{"type": "text", "text": "Be brief."}]],
    "tools": [[{"name": "look", "description": "Look it up.", "input_schema": SCHEMA}]],
    "tool_choice": [{"type": "any"}, {"type": "auto"}, {"type": "none"}, {"type": "tool", "name": "look"}],
    "thinking": [{"type": "disabled"}], "chat_template_kwargs": [{"enable_thinking": False}],
    "output_config": [{"effort": "low"}, {"format": {"type": "json_schema", "schema": SCHEMA}}],
    "stream": [True, False], "top_k": [1, 40], "temperature": [0, 1.0], "top_p": [0.9], "cache_salt": ["x"],
    "watermarking": [False], "mm_payload": ["none"], "return_mm_kwargs": [False],
}  # fmt: skip
TOKENIZE: Values = {
    "add_special_tokens": [False], "return_token_strs": [True], "add_generation_prompt": [False],
    "continue_final_message": [True], "tools": [[TOOL]], "chat_template_kwargs": [{"enable_thinking": False}],
}  # fmt: skip
#: Invalid values of any parameter, and those of some that are of its type.
ANYTHING: list[Any] = [None, -1, 0.5, 2**63, 1e308, "x", "", True, [], {}, [None], {"x": [{}]}, "\0\ud800"]
INVALID: Values = {
    "top_p": [0, 1.5], "presence_penalty": [3], "repetition_penalty": [0], "n": [0, 9], "min_tokens": [100],
    "logit_bias": [{str(TOKENS): 1}, {"x": 1}], "stop": ["", list("abcde")], "stop_token_ids": [[TOKENS]],
    "max_tokens": [0, 10**6], "max_output_tokens": [0, 10**6], "bad_words": [[""]],
    "logprob_token_ids": [[TOKENS]],
    "truncate_prompt_tokens": [0, 10**6], "logprobs": [21, -1], "top_logprobs": [21, -1], "suffix": ["x"],
    "thinking_token_budget": [5], "watermarking": [True], "routed_experts_prompt_start": [1],
    "return_mm_kwargs": [True],
    "response_format": [{"type": "json_schema"}], "truncation": ["auto"], "prompt": [{"id": "p"}],
    "chat_template_kwargs": [{"tools": 1}, {"chat_template": "x"}], "stop_sequences": [[""]],
    "thinking": [{"type": "enabled", "budget_tokens": 1024}], "tool_choice": [{"type": "tool", "name": "y"}],
    "output_config": [{"format": {"type": "json_schema", "schema": {"type": "x"}}}],
    "structured_outputs": [
        {"json": {"type": "x"}}, {"regex": "("}, {"choice": []}, {"grammar": "root ::="},
        {"structural_tag": "{}"},
        {"json": SCHEMA, "regex": "a"}, {}, {"regex": "a" * 5000},
    ],
}  # fmt: skip
#: Each endpoint's parameters, the one that limits the answer, and the endpoint's share of the requests.
ENDPOINTS: dict[str, tuple[Values, str, int]] = {
    "/completions": (COMPLETION, "max_tokens", 6),
    "/chat/completions": (CHAT, "max_tokens", 6),
    "/responses": (RESPONSE, "max_output_tokens", 4),
    "/messages": (MESSAGE, "max_tokens", 4),
    "/tokenize": (TOKENIZE, "", 1),
    "/detokenize": ({}, "", 1),
}


class Request(NamedTuple):
    """A path below ``/v1`` and its body."""

    path: str
    body: dict[str, Any]


def draw(chance: random.Random, models: list[str]) -> Request:
    """A request to some endpoint with up to :data:`MAX_PARAMETERS` parameters."""
    (path,) = chance.choices(list(ENDPOINTS), [share for _, _, share in ENDPOINTS.values()])
    values, limit, _ = ENDPOINTS[path]
    body: dict[str, Any] = {"model": chance.choice(models), **_prompt(chance, path)}
    if limit:
        body[limit] = 12
    for name in chance.sample(sorted(values), chance.randint(0, min(MAX_PARAMETERS, len(values)))):
        drawn = values[name]
        if chance.random() < INVALID_SHARE:
            drawn = chance.choice([ANYTHING, INVALID.get(name, ANYTHING)])
        body[name] = chance.choice(drawn)
    if path == "/responses" and body.get("stream") and body.get("structured_outputs") == DEAD_END:
        # vLLM breaks the stream off: its responses API has no event for errors of the generation.
        del body["structured_outputs"]
    return Request(path, body)


def _prompt(chance: random.Random, path: str) -> dict[str, Any]:
    """The field of ``path`` that holds the prompt, in one of its forms, rarely an invalid one."""
    invalid = chance.random() < INVALID_SHARE
    text = chance.choice(TEXTS)
    ids = [chance.randrange(TOKENS) for _ in range(chance.choice([1, 20]))]
    if path == "/detokenize":
        return {"tokens": chance.choice([[TOKENS], [-1], [2**63]]) if invalid else ids}
    if path == "/completions":
        valid = [text, text, [text, "hi"], ids, [ids, [1]]]
        return {"prompt": chance.choice([[TOKENS], [2**63], "", [], [[]], None] if invalid else valid)}
    messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
    if invalid:
        messages.append(
            {"role": chance.choice(["user", "x"]), "content": chance.choice(["", None, [], [{}]])}
        )
    elif chance.random() < 0.2:
        messages += [
            {"role": "assistant", "content": "It"},
            {"role": "user", "content": [{"type": "text", "text": text}]},
        ]
        if path == "/responses":
            messages[-1]["content"][0]["type"] = "input_text"
    if path == "/responses":
        return {"input": chance.choice([text, messages])}
    if path == "/tokenize" and chance.random() < 0.5:
        return {"prompt": text}
    return {"messages": messages}
