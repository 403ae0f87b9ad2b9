"""``POST /v1/messages`` of the simulated engine: Anthropic's shapes and event types."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.completions import Message, template
from serve.engine.sim.generation_service import Positive, Sampling, Service, request_id
from serve.engine.sim.http_messages import ApiError, answer, event, read, respond
from serve.engine.sim.step_loop import Generation


class MessagesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a message; ``max_tokens`` is required, as in Anthropic's API."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False


_DECODER = msgspec.json.Decoder(MessagesRequest)
_TYPES = {400: "invalid_request_error", 404: "not_found_error"}


async def messages(service: Service, request: Request) -> Response:
    """A message, as a stream or as a whole."""
    body = await read(request, _DECODER)
    sampling = Sampling(model=body.model, max_tokens=body.max_tokens, stop=body.stop_sequences)
    try:
        generation = service.generate([template(body.messages, body.system)], sampling)
        head = {
            "id": request_id(request, "msg"),
            "type": "message",
            "role": "assistant",
            "model": generation.model,
        }

        def whole() -> dict[str, Any]:
            content = [{"type": "text", "text": generation.outputs[0].text}]
            return {**head, "content": content, **_stop(generation), "usage": _usage(generation)}

        events = _events(generation, head) if body.stream else None
        return await respond(request, generation, whole, events)
    except ApiError as error:
        kind = _TYPES.get(error.status_code, "internal_error")
        failure = {"type": "error", "error": {"type": kind, "message": error.detail}}
        return answer(failure, error.status_code)


async def _events(generation: Generation, head: dict[str, Any]) -> AsyncIterator[bytes]:
    def typed(kind: str, **fields: Any) -> bytes:
        return event({"type": kind, **fields}, kind)

    deltas = generation.outputs[0].deltas
    async for _, position in generation.tokens():
        if position == 0:
            begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None}
            usage = {**_usage(generation), "output_tokens": 0}
            yield typed("message_start", message={**begun, "usage": usage})
            yield typed("content_block_start", index=0, content_block={"type": "text", "text": ""})
        delta = {"type": "text_delta", "text": deltas[position]}
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
    reason = "max_tokens" if output.finish_reason == "length" else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
