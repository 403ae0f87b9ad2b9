"""The simulated engine takes, reads and refuses conversations as vLLM does, and agents can run on it."""

from __future__ import annotations

import cProfile
import importlib
import json
import pstats
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2  # of Anthropic's client
import openai
import pytest

from serve.engine.sim.pseudo_tokenizer import TokenizedPrompt
from tests.serve.engine.sim.conversations import CASES, Turns, parameters
from tests.serve.sim_driver import client_of, engine_of, spec

VLLM = (
    "vllm.entrypoints.openai.chat_completion.protocol",
    "vllm.entrypoints.anthropic.protocol",
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.responses.protocol",
    "vllm.entrypoints.openai.responses.utils",
    "vllm.renderers.chat_utils",
)
TURNS = 5
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
}


def names(cases: list[Any]) -> list[str]:
    return [f"{path}-{json.dumps(body)[:60]}" for path, body, _ in cases]


@pytest.mark.parametrize(("path", "body", "turns"), CASES, ids=names(CASES))
async def test_a_conversation_is_read_or_refused(path: str, body: dict[str, Any], turns: Turns) -> None:
    async with engine_of(spec()) as engine, client_of(engine) as client:
        answer = await client.post(path, json={"model": "base", "max_tokens": 4, **body})
        assert (answer.status_code == 200) is (turns is not None), answer.text
        if turns is None:
            assert answer.status_code == 400
            return
        usage = answer.json()["usage"]
        text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
        wanted = len(TokenizedPrompt.of_text(f"{text}<|im_start|>assistant\n").tokens)
        assert usage.get("prompt_tokens", usage.get("input_tokens")) == wanted


async def test_parameters_are_taken_or_refused() -> None:
    async with engine_of(spec(max_model_len=2048)) as engine, client_of(engine) as client:
        found = [(await client.post(path, json=body)).status_code for path, body, _ in parameters("base")]
    wrong = [
        case for case, status in zip(parameters("base"), found, strict=True) if case[2] != (status == 200)
    ]
    assert wrong == []
    assert set(found) == {200, 400}


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("path", "body", "turns"), CASES, ids=names(CASES))
def test_vllm_reads_or_refuses_the_same(path: str, body: dict[str, Any], turns: Turns) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    for name in VLLM:  # a fault of an import is no refusal
        importlib.import_module(name)
    conversation: list[dict[str, Any]] = []
    try:
        conversation = vllms(path, {"model": "m", **body})
    except Exception:  # noqa: BLE001 - whatever it raises it answers with 400
        assert turns is None
        return
    assert turns is not None
    read = []
    for message in conversation:
        calls = [
            f"<tool_call>\n{json.dumps(call['function'], sort_keys=True)}\n</tool_call>"
            for call in message.get("tool_calls", ())
        ]
        read.append((message["role"], "\n".join([message["content"]] * bool(message["content"]) + calls)))
    assert read == [(role, _sorted(text)) for role, text in turns]


def _sorted(text: str) -> str:
    return "\n".join(
        json.dumps(json.loads(line), sort_keys=True) if line.startswith("{") else line
        for line in text.split("\n")
    )


def vllms(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation that vLLM's chat template is given."""
    chat, anthropics, serving, responses, items, chat_utils = map(importlib.import_module, VLLM)
    if path == "/v1/chat/completions":
        taken = chat.ChatCompletionRequest(**body)
        messages = taken.messages
    elif path == "/v1/messages":
        asked = anthropics.AnthropicMessagesRequest(**body)
        taken = serving.AnthropicServingMessages.to_chat_completion_request(asked)
        messages = taken.messages
    else:
        taken = asked = responses.ResponsesRequest(**body)
        messages = items.construct_input_messages(
            request_instructions=asked.instructions, request_input=asked.input
        )
    taken.to_sampling_params(4, {})  # its ranges
    config = SimpleNamespace(
        enable_prompt_embeds=False, multimodal_config=None, is_multimodal_model=False,
        allowed_local_media_path="", allowed_media_domains=None,
    )  # fmt: skip
    parsed, media, _ = chat_utils.parse_chat_messages(list(map(dict, messages)), config, "string")
    assert not media
    found: list[dict[str, Any]] = json.loads(json.dumps(parsed))
    return found


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"suffix": "x"}, None),
        ({"suffix": "x", "echo": True}, None),
        ({"max_tokens": 0}, None),
        ({"echo": True, "max_tokens": 0}, "A tide"),
        ({"echo": True, "max_tokens": 0, "stream": True}, "A tide"),
    ],
)
async def test_suffix_and_an_echo_without_tokens(body: dict[str, Any], text: str | None) -> None:
    async with engine_of(spec()) as engine, client_of(engine) as client:
        answer = await client.post("/v1/completions", json={"prompt": "A tide", **body})
    assert answer.status_code == (400 if text is None else 200)
    assert text is None or f'"text":"{text}"' in answer.text


@pytest.mark.parametrize("adapters", [True, False])
async def test_an_echo_has_log_probabilities_where_an_engine_survives_it(adapters: bool) -> None:
    args = {} if adapters else {"lora_modules": {}}
    ask = {"prompt": "A tide", "echo": True, "logprobs": 1, "max_tokens": 2}
    async with engine_of(spec(**args)) as engine, client_of(engine) as client:
        answer = await client.post("/v1/completions", json=ask)
    assert answer.status_code == (400 if adapters else 200)
    if not adapters:
        (choice,) = answer.json()["choices"]
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == choice["text"]
        assert [value is None for value in found["token_logprobs"]] == [True] + [False] * (
            len(found["tokens"]) - 1
        )


async def test_a_streamed_token_costs_the_same_after_any_prompt() -> None:
    async def calls(prompt: str) -> int:
        ask = {"prompt": prompt, "echo": True, "max_tokens": 50, "ignore_eos": True, "stream": True}
        async with engine_of(spec(max_model_len=4096)) as engine, client_of(engine) as client:
            with cProfile.Profile() as profile:
                assert (await client.post("/v1/completions", json=ask)).status_code == 200
        stats: Any = pstats.Stats(profile)
        return int(stats.total_calls)

    assert await calls("tide " * 2000) - await calls("tide") < 10 * 2000, "decoded once, not 50 times"


async def test_a_chat_echoes_the_beginning_of_its_answer() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    async with engine_of(spec()) as engine, client_of(engine) as client:
        ask = {"messages": messages, "echo": True, "max_tokens": 3}
        answer = (await client.post("/v1/chat/completions", json=ask)).json()
    assert answer["choices"][0]["message"]["content"].startswith("Well,")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_of_the_openai_client_calls_tools_and_ends(stream: bool) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    messages: list[Any] = [{"role": "user", "content": "Where is it warm?"}]
    prompts = []
    async with engine_of(spec(max_model_len=2048)) as engine:
        http = client_of(engine)
        async with openai.AsyncOpenAI(base_url="http://engine/v1", api_key="x", http_client=http) as client:
            for turn in range(TURNS):
                choice: Any = "required" if turn < TURNS - 1 else "none"
                ask: Any = {"model": "base", "messages": messages, "tools": [tool], "tool_choice": choice}
                if stream:
                    async with client.chat.completions.stream(
                        **ask, stream_options={"include_usage": True}
                    ) as events:
                        answer: Any = await events.get_final_completion()
                else:
                    answer = await client.chat.completions.create(**ask)
                message = answer.choices[0].message
                prompts.append(answer.usage.prompt_tokens)
                messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
                if answer.choices[0].finish_reason != "tool_calls":
                    break
                (call,) = message.tool_calls
                arguments = json.loads(call.function.arguments)
                assert call.function.name == "weather"
                assert arguments["city"] in {"Paris", "Rome"} and arguments["days"] >= 1
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees"})
    assert turn == TURNS - 1
    assert message.content and not message.tool_calls
    assert prompts == sorted(set(prompts))


@pytest.mark.parametrize("stream", [False, True])
async def test_an_agent_of_the_anthropic_client_calls_tools_and_ends(stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Where is it warm?"}]
    async with engine_of(spec(max_model_len=2048)) as engine:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(engine.app))
        async with anthropic.AsyncAnthropic(
            base_url="http://engine", api_key="x", http_client=http
        ) as client:
            for turn in range(TURNS):
                ask: Any = {
                    "model": "base", "messages": messages, "max_tokens": 200,
                    "tools": [{"name": "weather", "input_schema": SCHEMA}],
                    "tool_choice": {"type": "any" if turn < TURNS - 1 else "none"},
                }  # fmt: skip
                counted = await client.messages.count_tokens(
                    model="base", messages=messages, tools=ask["tools"]
                )
                if stream:
                    async with client.messages.stream(**ask) as events:
                        answer: Any = await events.get_final_message()
                else:
                    answer = await client.messages.create(**ask)
                assert counted.input_tokens == answer.usage.input_tokens
                content = [block.model_dump(exclude_none=True) for block in answer.content]
                messages.append({"role": "assistant", "content": content})
                if answer.stop_reason != "tool_use":
                    break
                (use,) = answer.content
                assert use.name == "weather"
                assert use.input["city"] in {"Paris", "Rome"} and use.input["days"] >= 1
                result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees"}
                messages.append({"role": "user", "content": [result]})
    assert turn == TURNS - 1
    assert answer.stop_reason in {"end_turn", "max_tokens"}
    assert answer.content[0].text


async def test_tokens_of_an_unknown_model_are_refused_in_anthropics_envelope() -> None:
    async with engine_of(spec()) as engine, client_of(engine) as client:
        body = {"model": "nobody", "messages": [{"role": "user", "content": "hi"}]}
        answer = await client.post("/v1/messages/count_tokens", json=body)
        empty = await client.post("/v1/messages/count_tokens", json={**body, "messages": []})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert empty.status_code == 400


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_calls_a_function_and_reads_its_output(stream: bool) -> None:
    given: list[Any] = [{"role": "user", "content": "Where is it warm?"}]
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
    async with engine_of(spec(max_model_len=2048)) as engine:
        http = client_of(engine)
        async with openai.AsyncOpenAI(base_url="http://engine/v1", api_key="x", http_client=http) as client:
            for choice in ("required", "none"):
                ask: Any = {"model": "base", "input": given, "tools": [tool], "tool_choice": choice}
                if stream:
                    async with client.responses.stream(**ask) as events:
                        answer: Any = await events.get_final_response()
                else:
                    answer = await client.responses.create(**ask)
                (item,) = answer.output
                if item.type == "function_call":
                    assert json.loads(item.arguments)["city"] in {"Paris", "Rome"}
                    call = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
                    output = {"type": "function_call_output", "call_id": item.call_id, "output": "21"}
                    given += [{"type": "function_call", **call}, output]
    assert answer.output_text


async def test_half_of_the_answers_are_calls_where_the_model_decides() -> None:
    tool = {"type": "function", "function": {"name": "weather"}}
    ask = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool], "max_tokens": 60}
    async with engine_of(spec()) as engine, client_of(engine) as client:
        answers = [
            (await client.post("/v1/chat/completions", json={**ask, "seed": i})).json() for i in range(60)
        ]
    called = sum(answer["choices"][0]["finish_reason"] == "tool_calls" for answer in answers)
    assert 15 <= called <= 45
