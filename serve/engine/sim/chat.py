"""``POST /v1/chat/completions`` of the simulated engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.http import DONE, ApiError, EventStream, answer, event, read, whole
from serve.engine.sim.service import Service, request_id
from serve.engine.sim.step_loop import Generation
from serve.engine.sim.text import Prompt, mix

Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream carries besides its tokens."""

    include_usage: bool | None = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What chat and completions have in common; fields that change nothing here are not named."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    max_tokens: Positive | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None

    @property
    def stops(self) -> list[str]:
        """The stop sequences as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage_wanted(self) -> bool:
        """Whether the stream ends with an event of usage; raises a 400 without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "Stream options can only be defined when `stream=True`.", "stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation; a content of parts may hold text alone."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """The body of a chat completion."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


_DECODER = msgspec.json.Decoder(ChatRequest)


def text_of(content: object) -> str:
    """The text of a message's content; raises a 400 for parts that are not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, "content must be a string or a list of parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise ApiError(400, "this model takes content parts of text only")
        texts.append(text)
    return "\n".join(texts)


def template(messages: list[Message]) -> Prompt:
    """The conversation as one prompt, in ChatML."""
    turns = [f"<|im_start|>{m.role}\n{text_of(m.content)}<|im_end|>\n" for m in messages]
    return Prompt.of_text("".join(turns) + "<|im_start|>assistant\n")


def usage(generation: Generation, n: int = 1) -> dict[str, Any]:
    """Tokens of the answer; a prompt with ``n`` choices counts once."""
    prompt = sum(len(prompt.tokens) for prompt in generation.prompts[::n])
    completion = sum(len(output.deltas) for output in generation.outputs)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": sum(generation.cached[::n])},
    }


def logprob(position: int, rank: int = 0) -> float:
    """A plausible log probability in nats: the same each time, lower for each further rank."""
    return -(0.01 + mix(position) % 1000 / 1000 + rank)


async def chat(service: Service, request: Request) -> Response:
    """A chat completion, streamed or whole."""
    body = await read(request, _DECODER)
    adapter = service.resolve(body.model)
    with_usage = body.usage_wanted
    n = body.n or 1
    generation = service.generate(
        [template(body.messages)],
        adapter=adapter,
        seed=body.seed,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        n=n,
        stops=body.stops,
        ignore_eos=body.ignore_eos,
        salt=body.cache_salt,
    )
    head = {
        "id": request_id(request, "chatcmpl"),
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": service.now(),
        "model": adapter or service.model,
    }
    if body.stream:
        stream = _stream(generation, head, body, n if with_usage else 0)
        return EventStream(stream, lambda: service.abort(generation))
    await whole(request, generation, lambda: service.abort(generation))
    choices: list[dict[str, Any]] = [
        {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None, "tool_calls": []},
            "logprobs": _logprobs(body, output.deltas, 0),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop,
        }
        for index, output in enumerate(generation.outputs)
    ]
    return answer({**head, "choices": choices, "usage": usage(generation, n)})


async def _stream(
    generation: Generation, head: dict[str, Any], body: ChatRequest, usage_of_n: int
) -> AsyncIterator[bytes]:
    async for index, position in generation.tokens():
        output = generation.outputs[index]
        choice: dict[str, Any] = {"index": index}
        if position == 0:
            role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield event({**head, "choices": [{**choice, **role}]})
        choice["delta"] = {"content": output.deltas[position]}
        choice["logprobs"] = _logprobs(body, [output.deltas[position]], position)
        last = position + 1 == len(output.deltas)
        choice["finish_reason"] = output.finish_reason if last else None
        if last:
            choice["stop_reason"] = output.stop
        yield event({**head, "choices": [choice]})
    if usage_of_n:
        yield event({**head, "choices": [], "usage": usage(generation, usage_of_n)})
    yield DONE


def _logprobs(body: ChatRequest, tokens: list[str], start: int) -> dict[str, Any] | None:
    if not body.logprobs:
        return None

    def entry(token: str, position: int, rank: int) -> dict[str, Any]:
        # Alternatives are the token in other spellings: they differ, and cost no vocabulary.
        spelled = token + "'" * rank
        return {"token": spelled, "logprob": logprob(position, rank), "bytes": list(spelled.encode())}

    content = [
        {
            **entry(token, position, 0),
            "top_logprobs": [entry(token, position, rank) for rank in range(body.top_logprobs or 0)],
        }
        for position, token in enumerate(tokens, start)
    ]
    return {"content": content}
