"""``POST /v1/responses`` of the simulated engine: text only, with OpenAI's event types."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.completions import Message, template
from serve.engine.sim.generation_service import Positive, Sampling, Service, now, request_id
from serve.engine.sim.http_messages import ApiError, event, read, respond


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a response."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    stream: bool | None = False
    previous_response_id: str | None = None
    background: bool | None = False


_DECODER = msgspec.json.Decoder(ResponsesRequest)


async def responses(service: Service, request: Request) -> Response:
    """A response, as a stream or as a whole."""
    body = await read(request, _DECODER)
    service.resolve(body.model)
    for param in ("previous_response_id", "background"):
        if getattr(body, param):
            raise ApiError(400, f"{param} needs a store of responses, which this engine does not have", param)
    sampling = Sampling(model=body.model, max_tokens=body.max_output_tokens)
    generation = service.generate([template(_messages(body), body.instructions)], sampling)
    output = generation.outputs[0]
    response_id = request_id(request, "resp")
    item_id = response_id.replace("resp", "msg", 1)
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
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}},
    }

    def item(status: str, *content: dict[str, Any]) -> dict[str, Any]:
        return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}

    def whole() -> dict[str, Any]:
        """The whole response; it is incomplete if the token limit ended it."""
        cut = output.finish_reason == "length"
        prompt, written = len(generation.prompts[0].tokens), len(output.deltas)
        return {
            **head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [item("completed", part(output.text))],
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
        at = {"item_id": item_id, "output_index": 0, "content_index": 0}
        async for _, position in generation.tokens():
            if position == 0:
                yield typed("output_item.added", output_index=0, item=item("in_progress"))
                yield typed("content_part.added", **at, part=part(""))
            yield typed("output_text.delta", **at, delta=output.deltas[position], logprobs=[])
        yield typed("output_text.done", **at, text=output.text, logprobs=[])
        yield typed("content_part.done", **at, part=part(output.text))
        yield typed("output_item.done", output_index=0, item=item("completed", part(output.text)))
        yield typed("completed", response=whole())

    return await respond(request, generation, whole, events() if body.stream else None)


def _messages(body: ResponsesRequest) -> list[Message]:
    if isinstance(body.input, str):
        return [Message("user", body.input)]
    given = [item for item in body.input if item.get("type", "message") == "message"]
    if not given:
        raise ApiError(400, "input has no message", "input")
    return [Message(str(item.get("role", "user")), item.get("content")) for item in given]
