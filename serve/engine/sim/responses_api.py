"""``POST /v1/responses`` of the simulated engine: text only, with OpenAI's event types."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.chat import Message, template
from serve.engine.sim.http import ApiError, EventStream, answer, event, read, whole
from serve.engine.sim.service import Service, request_id
from serve.engine.sim.step_loop import Generation


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a response."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = False
    previous_response_id: str | None = None
    background: bool | None = False


_DECODER = msgspec.json.Decoder(ResponsesRequest)


async def responses(service: Service, request: Request) -> Response:
    """A response, as a stream or as a whole."""
    body = await read(request, _DECODER)
    adapter = service.resolve(body.model)
    for param in ("previous_response_id", "background"):
        if getattr(body, param):
            raise ApiError(400, f"{param} needs a store of responses, which this engine does not have", param)
    generation = service.generate(
        [template(_messages(body))], adapter=adapter, seed=None, max_tokens=body.max_output_tokens
    )
    answering = _Answer(service, body, generation, adapter, request_id(request, "resp"))
    if body.stream:
        return EventStream(answering.events(), lambda: service.abort(generation))
    await whole(request, generation, lambda: service.abort(generation))
    return answer(answering.finished())


def _messages(body: ResponsesRequest) -> list[Message]:
    first = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*first, Message("user", body.input)]
    given = [item for item in body.input if item.get("type", "message") == "message"]
    if not given:
        raise ApiError(400, "input has no message", "input")
    return [*first, *(Message(str(item.get("role", "user")), item.get("content")) for item in given)]


class _Answer:
    """One response's objects, from created to completed."""

    def __init__(
        self, service: Service, body: ResponsesRequest, generation: Generation, adapter: str, name: str
    ) -> None:
        self._generation = generation
        self._output = generation.outputs[0]
        self._item_id = name.replace("resp", "msg", 1)
        self._head = {
            "id": name,
            "object": "response",
            "created_at": service.now(),
            "model": adapter or service.model,
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

    def finished(self) -> dict[str, Any]:
        """The whole response; it is incomplete if the token limit ended it."""
        cut = self._output.finish_reason == "length"
        prompt, written = len(self._generation.prompts[0].tokens), len(self._output.deltas)
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item("completed", [self._part(self._output.text)])],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": self._generation.cached[0]},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + written,
            },
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The events of the stream. As in vLLM the last is response.completed, also if it is incomplete."""
        numbers = itertools.count()

        def say(kind: str, **fields: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **fields}, kind)

        started = {**self._head, "status": "in_progress", "incomplete_details": None, "output": []}
        yield say("response.created", response=started)
        yield say("response.in_progress", response=started)
        at = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        async for _, position in self._generation.tokens():
            if position == 0:
                item = self._item("in_progress", [])
                yield say("response.output_item.added", output_index=0, item=item)
                yield say("response.content_part.added", **at, part=self._part(""))
            delta = self._output.deltas[position]
            yield say("response.output_text.delta", **at, delta=delta, logprobs=[])
        text = self._output.text
        yield say("response.output_text.done", **at, text=text, logprobs=[])
        yield say("response.content_part.done", **at, part=self._part(text))
        item = self._item("completed", [self._part(text)])
        yield say("response.output_item.done", output_index=0, item=item)
        yield say("response.completed", response=self.finished())

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
