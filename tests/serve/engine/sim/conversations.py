"""Bodies of conversations, whether vLLM takes them for a model of text, and the turns that it reads."""

from __future__ import annotations

from typing import Any

USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
CALLED = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
ITEM = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
HI = ("user", "hi")
# Claude Code's, which has another value in each request.
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.c05; cc_entrypoint=cli; cch=00000;"
HEADED = {"type": "text", "text": HEADER}
LONGER = {"type": "text", "text": f"{HEADER}\nBe brief."}
BRIEF = ("system", "Be brief.")

Turns = list[tuple[str, str]] | None


def chat(*messages: dict[str, Any], turns: Turns = None, **more: Any) -> tuple[str, dict[str, Any], Turns]:
    return "/v1/chat/completions", {"messages": list(messages), **more}, turns


def part(*parts: Any, turns: Turns = None) -> tuple[str, dict[str, Any], Turns]:
    return chat({"role": "user", "content": list(parts)}, turns=turns)


def claude(*messages: dict[str, Any], turns: Turns = None, **more: Any) -> tuple[str, dict[str, Any], Turns]:
    return "/v1/messages", {"messages": list(messages), "max_tokens": 4, **more}, turns


def block(*blocks: Any, turns: Turns = None) -> tuple[str, dict[str, Any], Turns]:
    return claude(USER, {"role": "user", "content": list(blocks)}, turns=turns)


def items(*given: dict[str, Any], turns: Turns = None, **more: Any) -> tuple[str, dict[str, Any], Turns]:
    return "/v1/responses", {"input": list(given), **more}, turns


def changed(*blocks: Any, turns: Turns = None) -> tuple[str, dict[str, Any], Turns]:
    """A conversation in which tools are added or removed."""
    changes = {"role": "system", "content": list(blocks)}
    tools = [{"name": "look", "input_schema": {}}]
    return claude(USER, changes, turns=turns, tools=tools, tool_choice={"type": "none"})


def removed(name: str) -> dict[str, Any]:
    return {"type": "tool_removal", "tool": {"type": "tool_reference", "name": name}}


TOOL = {"type": "function", "function": {"name": "look"}}
DEFINED = {"type": "tool_definition", "definition": {"name": "read", "input_schema": {}}}

NAMED = {"type": "tool_reference", "tool_name": "look"}

CASES = [
    chat(USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "look"}}]}),
    chat(USER, {"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}),
    chat(USER, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "x", "arguments": {}}}]}),
    chat(USER, stop=""),
    chat(USER, stop=["a"] * 5),
    chat(USER, temperature=2.5),
    chat(USER, top_k=-5),
    chat(USER, frequency_penalty=-3),
    chat(USER, top_logprobs=5),
    block({**RESULT, "content": [{"type": "odd"}, {"type": "text"}]}, turns=[HI, ("tool", "")]),
    block(
        {**RESULT, "content": [{"type": "text", "text": "4"}, NAMED]},
        turns=[HI, ("tool", "4"), ("tool", "look")],
    ),
    block({**RESULT, "content": [{"type": "image", "source": {"data": "aGk="}}]}),
    block({**RESULT, "content": 5}),
    block(
        {"type": "text", "text": "a"},
        RESULT,
        RESULT,
        turns=[HI, ("tool", "42"), ("tool", "42"), ("user", "a")],
    ),
    block({"type": "text", "text": None}, turns=[HI]),
    block({"type": "image"}, turns=[HI]),
    claude(
        USER,
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        turns=[HI, ("system", "ab")],
    ),
    claude(
        USER,
        system=[{"type": "image", "source": {"data": "aGk="}}, {"type": "text", "text": "x"}],
        turns=[("system", "x"), HI],
    ),
    claude(USER, system=[{"type": "odd"}]),
    claude(USER, temperature=5),
    items({"type": "function_call_output", "output": "x"}, turns=[("tool", "x")]),
    items({"type": "function_call_output", "call_id": "c"}),
    items({"type": "message", "role": "user", "content": None}),
    items(USER, temperature=5),
    items({"type": "reasoning", "summary": []}, turns=[("assistant", "")]),
    items(USER, {"type": "reasoning"}),
    items(USER, {"type": "reasoning", "summary": [], "encrypted_content": "x"}),
    items(USER, {"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}),
    items({"role": "user", "content": [{"type": "text", "text": "x"}]}),
    items({**OUTPUT, "call_id": 5}),
    items(
        USER,
        {"type": "custom_tool_call", "call_id": "c", "name": "look", "input": "y"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "z"},
        turns=[HI, ("assistant", CALLED.replace('{"a": 1}', '{"input": "y"}')), ("tool", "z")],
    ),
    chat({"role": "tool", "content": None}),
    block({**RESULT, "tool_use_id": 5}),
    block({**RESULT, "content": ["x"]}),
    block({**RESULT, "is_error": "x"}),
    block({"type": "thinking", "thinking": "x", "signature": 5}),
    block({**USE, "input": "x"}),
    items(USER, tool_choice="required"),
    chat(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "42"}]},
        turns=[HI, ("assistant", CALLED), ("tool", "42")],
    ),
    chat(
        {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "look", "arguments": "{"}}]},
        turns=[("assistant", CALLED.replace('{"a": 1}', "{}"))],
    ),
    chat({"role": "wizard", "content": "x"}, {"role": "user"}, turns=[("wizard", "x"), ("user", "")]),
    chat({"role": "developer", "content": "x"}, USER, turns=[("developer", "x"), HI]),
    chat({"role": "assistant", "content": "x", "reasoning": "y"}, USER, turns=[("assistant", "x"), HI]),
    chat({"content": "x"}),
    chat({"role": 5, "content": "x"}),
    chat({"role": "user", "content": 5}),
    chat({"role": "assistant", "tool_calls": [5]}),
    chat({"role": "assistant", "tool_calls": [{"id": "1", "type": "custom", "custom": {}}]}),
    part({"type": "text", "text": "a"}, {"type": "text", "text": "b"}, turns=[("user", "a\nb")]),
    part(
        {"type": "thinking", "thinking": "a"}, {"type": "refusal", "refusal": "b"}, turns=[("user", "a\nb")]
    ),
    part({"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}),
    part({"type": "odd", "text": "x"}),
    part({"text": "x"}),
    part({"type": "text"}),
    part({"type": "input_text", "text": "x"}),
    part("x"),
    part({"type": "tool_result", "content": "x"}),
    chat(USER, tools=[]),
    chat(USER, tools=[{"type": "function"}]),
    chat(USER, tools=[{"type": "custom", "custom": {"name": "x"}}]),
    chat(USER, tools=[TOOL], tool_choice="odd"),
    chat(USER, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "other"}}),
    chat(USER, tool_choice="auto"),
    claude(
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I look"}, USE]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "go"}]},
        turns=[HI, ("assistant", f"I look\n{CALLED}"), ("tool", "42"), ("user", "go")],
    ),
    claude(
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "x", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                USE,
            ],
        },
        {
            "role": "user",
            "content": [
                {**RESULT, "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}
            ],
        },
        turns=[HI, ("assistant", CALLED), ("tool", "4\n2")],
    ),
    claude({"role": "system", "content": "x"}, USER, turns=[("system", "x"), HI]),
    claude(
        USER,
        system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        turns=[("system", "ab"), HI],
    ),
    claude(USER, {"role": "assistant", "content": [RESULT]}, turns=[HI, ("assistant", "Tool result: 42")]),
    block({"type": "tool_result"}, turns=[HI, ("tool", "")]),
    block({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}),
    block({"type": "document", "source": {}}),
    block({"type": "odd"}),
    block({"text": "x"}),
    block("x"),
    claude({"role": "wizard", "content": "x"}),
    claude({"role": "tool", "content": "x"}),
    claude({"role": "user"}),
    claude(USER, thinking={"type": "enabled", "budget_tokens": 5}),
    claude(USER, tool_choice={"type": "tool"}),
    claude(USER, tools=[{"name": "x"}]),
    items(USER, ITEM, OUTPUT, turns=[HI, ("assistant", CALLED), ("tool", "42")]),
    items(
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
        ITEM,
        {**OUTPUT, "output": [{"type": "input_text", "text": "42"}]},
        turns=[HI, ("assistant", f"I look\n{CALLED}"), ("tool", "42")],
    ),
    items(
        {"role": "developer", "content": [{"type": "input_text", "text": "x"}]}, turns=[("developer", "x")]
    ),
    chat({"role": "system", "content": LONGER["text"]}, USER, turns=[BRIEF, HI]),
    chat({"role": "system", "content": [HEADED, LONGER]}, USER, turns=[BRIEF, HI]),
    chat({"role": "developer", "content": HEADER}, USER, turns=[("developer", HEADER), HI]),
    chat({"role": "user", "content": HEADER}, turns=[("user", HEADER)]),
    claude(USER, system=[HEADED, {"type": "text", "text": "Be brief."}], turns=[BRIEF, HI]),
    claude(USER, system=[LONGER, {"type": "text", "text": "Be brief."}], turns=[BRIEF, HI]),
    claude(USER, system=LONGER["text"], turns=[BRIEF, HI]),
    claude(USER, {"role": "system", "content": LONGER["text"]}, turns=[HI]),
    claude(
        USER,
        {"role": "system", "content": [HEADED, {"type": "text", "text": "Be brief."}]},
        turns=[HI, BRIEF],
    ),
    claude({"role": "user", "content": HEADER}, turns=[("user", HEADER)]),
    items(USER, instructions=LONGER["text"], turns=[BRIEF, HI]),
    items({"role": "system", "content": LONGER["text"]}, USER, turns=[BRIEF, HI]),
    changed(removed("look"), turns=[HI]),
    changed({"type": "tool_addition", "tool": DEFINED}, removed("read"), removed("look"), turns=[HI]),
    changed(removed("read")),
    changed({"type": "tool_removal", "tool": DEFINED}),
    changed({"type": "tool_removal"}),
    block({"type": "tool_addition", "tool": DEFINED}),
    items({"role": "wizard", "content": "x"}),
    items({"type": "odd"}),
    items({"type": "item_reference", "id": "x"}),
    items({"type": "function_call", "name": "x"}),
    items({"role": "user", "content": [{"type": "odd"}]}),
    items(
        {
            "role": "user",
            "content": [{"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}],
        }
    ),
]

# Parameters of otherwise valid requests that vLLM takes, and those that it refuses, in a context of 2048.
CHAT_TAKEN: list[dict[str, Any]] = [
    {"n": "2"}, {"temperature": "0.5"}, {"seed": "7"}, {"max_tokens": "5"}, {"max_tokens": 2.0},
    {"stream": 1}, {"stream_options": {}}, {"prompt_logprobs": -1}, {"model": ""},
    {"response_format": {"type": "text"}}, {"add_generation_prompt": False},
    {"structured_outputs": {"choice": ["a", "b"]}}, {"min_tokens": 2}, {"bad_words": ["x"]},
    {"logit_bias": {"5": 1}}, {"tool_choice": "none"}, {"reasoning_effort": "low"}, {"stream": "yes"},
    {"temperature": True}, {"echo": "off"}, {"structured_outputs": {"regex": "a+"}},
]  # fmt: skip
CHAT_REFUSED: list[dict[str, Any]] = [
    {"continue_final_message": True}, {"add_generation_prompt": "x"}, {"chat_template": "{{ x }}"},
    {"response_format": {}}, {"response_format": {"type": "odd"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, {"user": 5},
    {"request_id": 5}, {"response_format": "json"}, {"min_tokens": 5}, {"min_tokens": -1}, {"seed": 2**63},
    {"max_tokens": 100_000}, {"max_completion_tokens": 100_000}, {"logit_bias": {"x": 1}},
    {"logit_bias": [1]}, {"bad_words": [""]}, {"bad_words": "x"}, {"stop_token_ids": ["x"]},
    {"truncate_prompt_tokens": -2}, {"cache_salt": ""}, {"truncate_prompt_tokens": 99_999},
    {"allowed_token_ids": []}, {"prompt_logprobs": 1}, {"prompt_logprobs": 1, "stream": True},
    {"echo": True, "logprobs": True, "top_logprobs": 1}, {"reasoning_effort": "odd"},
    {"structured_outputs": {}}, {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "json": {}}}, {"messages": []},
    {"structured_outputs": {"regex": "("}}, {"structured_outputs": {"json": "x"}},
    {"structured_outputs": {"grammar": "odd"}}, {"response_format": {"type": "structural_tag", "format": {}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}},
    {"stream": "perhaps"},
    {"tools": [TOOL], "tool_choice": {"type": "odd", "function": {"name": "look"}}},
]  # fmt: skip
TEXT_REFUSED: list[dict[str, Any]] = [
    {"prompt": ""}, {"prompt": ["a", ""]}, {"prompt": [[1], "a"]}, {"prompt": [[1], []]},
    {"max_tokens": 10**6}, {"min_tokens": 9}, {"prompt_logprobs": 1}, {"prompt_logprobs": -2},
    {"echo": True, "logprobs": 1}, {"skip_special_tokens": None}, {"truncate_prompt_tokens": 0},
    {"user": 5}, {"suffix": "x"}, {"prompt_embeds": "x"}, {"kv_transfer_params": 5},
]  # fmt: skip
CLAUDE_REFUSED: list[dict[str, Any]] = [
    {"stop_sequences": [""]}, {"stop_sequences": ["a"] * 9}, {"top_k": -5}, {"top_p": 0}, {"top_p": "x"},
    {"max_tokens": 10**6}, {"metadata": 5}, {"output_config": 5}, {"output_config": {"effort": "odd"}},
    {"output_config": {"format": {"type": "odd"}}}, {"model": ""}, {"messages": []},
    {"messages": [{"role": "user", "content": []}]},
]  # fmt: skip
RESPONSE_REFUSED: list[dict[str, Any]] = [
    {"max_output_tokens": 10**6}, {"top_p": 0}, {"top_k": -5}, {"presence_penalty": 5},
    {"repetition_penalty": 0}, {"prompt": {"id": "x"}}, {"text": {"format": {"type": "odd"}}},
    {"truncation": "odd"}, {"tools": [{}]}, {"reasoning": {"effort": "odd"}}, {"service_tier": "odd"},
    {"user": 5}, {"metadata": 5}, {"cache_salt": ""}, {"parallel_tool_calls": "x"},
    {"tools": [{"type": "web_search"}], "tool_choice": "required"}, {"include": ["odd"]},
]  # fmt: skip
_BODIES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]] = {
    "/v1/chat/completions": ({"messages": [USER]}, CHAT_TAKEN, CHAT_REFUSED),
    "/v1/completions": (
        {"prompt": "A tide"},
        [{"echo": 1}, {"echo": "yes"}, {"logprobs": True}, {"n": 129, "max_tokens": 1}],
        TEXT_REFUSED,
    ),
    "/v1/messages": (
        {"messages": [USER]},
        [{"max_tokens": "4"}, {"temperature": "1"}, {"tool_choice": {"type": "tool", "name": "look"}}],
        CLAUDE_REFUSED,
    ),
    "/v1/responses": ({"input": "hi"}, [{"max_output_tokens": "4"}], RESPONSE_REFUSED),
}


def parameters(model: str) -> list[tuple[str, dict[str, Any], bool]]:
    """By path a body for ``model``, and whether it is taken."""
    return [
        (path, {"model": model, "max_tokens": 4, **usual, **more}, taken)
        for path, (usual, *both) in _BODIES.items()
        for taken, bodies in zip((True, False), both, strict=True)
        for more in bodies
    ]
