"""``POST /v1/messages`` and its ``count_tokens`` of the simulated engine: Anthropic's shapes and events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.chat_template import (
    AnthropicTool,
    ChatMessage,
    Content,
    anthropic_turns,
    changed_tools,
    prompt_of,
)
from serve.engine.sim.generation_service import GenerationService, call_id, request_id
from serve.engine.sim.http_exchange import ApiError, answer, event, read, respond
from serve.engine.sim.pseudo_tokenizer import TokenizedPrompt
from serve.engine.sim.sampling_parameters import GenerationFields, NotEmpty, Positive, SamplingFields, Stops
from serve.engine.sim.step_loop import Generation
from serve.engine.sim.tool_calls import FunctionDefinition, ToolSet

# Names of the chat API for the types of `tool_choice`.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ToolChoice(msgspec.Struct, frozen=True):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None


class ThinkingConfig(msgspec.Struct, frozen=True):
    """Extended thinking; a budget needs a model that reasons."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    """The format of an answer."""

    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, frozen=True):
    """How the answer is written."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingFields, frozen=True, kw_only=True):
    """The parts of a message's body that make its prompt."""

    model: NotEmpty
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    system: Content = None
    tools: list[AnthropicTool] | None = None

    @property
    def offered(self) -> list[AnthropicTool]:
        """The tools, as messages changed them."""
        return changed_tools(self.messages, self.tools or ())

    @property
    def prompt(self) -> TokenizedPrompt:
        tools = [msgspec.to_builtins(tool) for tool in self.offered]
        return prompt_of(anthropic_turns(self.messages, self.system), tools)


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """The body of a message; ``max_tokens`` is required, as in Anthropic's API."""

    max_tokens: Positive
    stop_sequences: Stops | None = None
    stream: bool | None = False
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    metadata: dict[str, Any] | None = None
    output_config: OutputConfig | None = None


_DECODER = msgspec.json.Decoder(MessagesRequest, strict=False)
_COUNT_DECODER = msgspec.json.Decoder(CountTokensRequest, strict=False)
_TYPES = {400: "invalid_request_error", 404: "not_found_error"}


async def messages(service: GenerationService, request: Request) -> Response:
    """A message, as a stream or as a whole."""
    body = await read(request, _DECODER)
    try:
        if body.thinking is not None and body.thinking.type == "enabled":
            raise ApiError(400, "thinking_token_budget is set, but this model does not reason.", "thinking")
        sampling = GenerationFields(model=body.model, max_tokens=body.max_tokens, stop=body.stop_sequences)
        generation = service.generate([body.prompt], sampling, _tools(body))
        head = {
            "id": request_id(request, "msg"),
            "type": "message",
            "role": "assistant",
            "model": generation.model,
        }

        def whole() -> dict[str, Any]:
            return {**head, "content": [_block(generation)], **_stop(generation), "usage": _usage(generation)}

        events = _events(generation, head) if body.stream else None
        return await respond(request, generation, whole, events)
    except ApiError as error:
        return _refused(error)


async def count_tokens(service: GenerationService, request: Request) -> Response:
    """How many tokens the prompt of a message has."""
    body = await read(request, _COUNT_DECODER)
    try:
        service.resolve(body.model)
        count = len(body.prompt.tokens)
    except ApiError as error:
        return _refused(error)
    return answer({"input_tokens": count, "context_management": {"original_input_tokens": count}})


def _refused(error: ApiError) -> Response:
    kind = _TYPES.get(error.status_code, "internal_error")
    return answer({"type": "error", "error": {"type": kind, "message": error.detail}}, error.status_code)


def _tools(body: MessagesRequest) -> ToolSet:
    choice = body.tool_choice or ToolChoice("auto")
    if choice.type == "tool" and not choice.name:
        raise ApiError(400, "tool_choice.name is required when type is 'tool'", "tool_choice")
    functions = [FunctionDefinition(tool.name, tool.description, tool.input_schema) for tool in body.offered]
    if not functions:
        return ToolSet([], "none")
    return ToolSet(functions, _CHOICES.get(choice.type) or choice.name or "")


def _block(generation: Generation, *, begun: bool = False) -> dict[str, Any]:
    """The answer's block of content; when it has only ``begun``, without its content."""
    output = generation.outputs[0]
    if not output.tool:
        return {"type": "text", "text": "" if begun else output.text}
    try:
        given = {} if begun else json.loads(output.text)
    except ValueError:  # cut by max_tokens
        given = {}
    return {"type": "tool_use", "id": call_id(), "name": output.tool, "input": given}


async def _events(generation: Generation, head: dict[str, Any]) -> AsyncIterator[bytes]:
    def typed(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    output = generation.outputs[0]
    kind, field = ("input_json_delta", "partial_json") if output.tool else ("text_delta", "text")
    async for _, position in generation.tokens():
        if position == 0:
            begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
            usage = {**_usage(generation), "output_tokens": 0}
            yield typed("message_start", message={**begun, "usage": usage})
            yield typed("content_block_start", index=0, content_block=_block(generation, begun=True))
        delta = {"type": kind, field: output.deltas[position]}
        yield typed("content_block_delta", index=0, delta=delta)
    yield typed("content_block_stop", index=0)
    yield typed("message_delta", delta=_stop(generation), usage=_usage(generation))
    yield typed("message_stop")


def _usage(generation: Generation) -> dict[str, int]:
    return {
        "input_tokens": len(generation.prompts[0].tokens),
        "output_tokens": len(generation.outputs[0].deltas),
    }


def _stop(generation: Generation) -> dict[str, str | None]:
    output = generation.outputs[0]
    if output.stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": output.stop}
    ended = "tool_use" if output.tool else "end_turn"
    return {"stop_reason": "max_tokens" if output.finish_reason == "length" else ended, "stop_sequence": None}
