"""``POST /v1/responses`` of the simulated engine: text and calls of functions, with OpenAI's event types."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.chat_template import prompt_of, responses_turns
from serve.engine.sim.generation_service import GenerationService, call_id, now, request_id
from serve.engine.sim.http_exchange import ApiError, event, read, respond
from serve.engine.sim.pseudo_tokenizer import GeneratedText
from serve.engine.sim.sampling_parameters import GenerationFields, OpenAiSamplingFields, Positive
from serve.engine.sim.tool_calls import FunctionDefinition, ToolSet

# Parts of an answer that can be asked for.
Included = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
]  # fmt: skip


class TextFormat(msgspec.Struct, frozen=True):
    """The format of the text of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextConfig(msgspec.Struct, frozen=True):
    """How the text of an answer is written."""

    format: TextFormat | None = None


class Reasoning(msgspec.Struct, frozen=True):
    """How much is reasoned."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(OpenAiSamplingFields, frozen=True, kw_only=True):
    """The body of a response."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = False
    previous_response_id: str | None = None
    background: bool | None = False
    prompt: dict[str, Any] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    parallel_tool_calls: bool | None = True
    metadata: dict[str, str] | None = None
    include: list[Included] | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: str | dict[str, Any] = "auto"


_DECODER = msgspec.json.Decoder(ResponsesRequest, strict=False)


async def responses(service: GenerationService, request: Request) -> Response:
    """A response, as a stream or as a whole."""
    body = await read(request, _DECODER)
    service.resolve(body.model)
    _check(body)
    sampling = GenerationFields(model=body.model, max_tokens=body.max_output_tokens)
    turns = responses_turns(body.input, body.instructions)
    functions = [tool for tool in body.tools if tool.get("type") == "function"]
    if body.tool_choice == "required" and not functions:
        raise ApiError(400, "Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    generation = service.generate(
        [prompt_of(turns, functions)], sampling, _tools(functions, body.tool_choice)
    )
    output = generation.outputs[0]
    response_id = request_id(request, "resp")
    item_id = response_id.replace("resp", "fc" if output.tool else "msg", 1)
    item = partial(_item, output, item_id, call_id())
    head = {
        "id": response_id,
        "object": "response",
        "created_at": now(),
        "model": generation.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "error": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "text": {"format": {"type": "text"}},
    }

    def whole() -> dict[str, Any]:
        """The whole response; it is incomplete if the token limit ended it."""
        cut = output.finish_reason == "length"
        prompt, written = len(generation.prompts[0].tokens), len(output.deltas)
        return {
            **head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [item("completed", output.text)],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": generation.cached[0]},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + written,
            },
        }

    async def events() -> AsyncIterator[bytes]:
        """The events of the stream. As in vLLM the last is response.completed, also if it is incomplete."""
        numbers = itertools.count()

        def typed(kind: str, **fields: Any) -> bytes:
            kind = f"response.{kind}"
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        started = {**head, "status": "in_progress", "incomplete_details": None, "output": []}
        yield typed("created", response=started)
        yield typed("in_progress", response=started)
        of_item = {"item_id": item_id, "output_index": 0}
        at = {**of_item, "content_index": 0}
        async for _, position in generation.tokens():
            if position == 0:
                yield typed("output_item.added", output_index=0, item=item("in_progress"))
                if not output.tool:
                    yield typed("content_part.added", **at, part=_part(""))
            if output.tool:
                yield typed("function_call_arguments.delta", **of_item, delta=output.deltas[position])
            else:
                yield typed("output_text.delta", **at, delta=output.deltas[position], logprobs=[])
        if output.tool:
            given = {"arguments": output.text, "name": output.tool}
            yield typed("function_call_arguments.done", **of_item, **given)
        else:
            yield typed("output_text.done", **at, text=output.text, logprobs=[])
            yield typed("content_part.done", **at, part=_part(output.text))
        yield typed("output_item.done", output_index=0, item=item("completed", output.text))
        yield typed("completed", response=whole())

    return await respond(request, generation, whole, events() if body.stream else None)


def _item(
    output: GeneratedText, item_id: str, called: str, status: str, text: str | None = None
) -> dict[str, Any]:
    """The item of the answer; without ``text`` it has only begun."""
    if output.tool:
        call = {"call_id": called, "name": output.tool, "arguments": text or ""}
        return {"id": item_id, "type": "function_call", "status": status, **call}
    content = [] if text is None else [_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}


def _check(body: ResponsesRequest) -> None:
    if body.previous_response_id is not None:
        raise ApiError(404, f"Response with id '{body.previous_response_id}' not found.", "response_id")
    if body.background:
        why = "background needs a store of responses, which this engine does not have"
        raise ApiError(400, why, "background")
    if body.prompt is not None:
        raise ApiError(400, "prompt template is not supported", "prompt")
    if not all(isinstance(tool.get("type"), str) for tool in body.tools):
        raise ApiError(400, "a tool needs a type", "tools")


def _tools(functions: list[dict[str, Any]], choice: str | dict[str, Any]) -> ToolSet:
    wanted = choice if isinstance(choice, str) else str(choice.get("name", ""))
    try:
        return ToolSet(msgspec.convert(functions, list[FunctionDefinition]), wanted)
    except msgspec.ValidationError as error:
        raise ApiError(400, str(error), "tools") from None
