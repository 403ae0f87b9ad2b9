"""The parts that chat completions and completions of the simulated engine share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.http import DONE, ApiError, EventStream, answer, event, whole
from serve.engine.sim.service import Service, request_id
from serve.engine.sim.step_loop import Generation
from serve.engine.sim.text import Output, Prompt, mix

Positive = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | None = False


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Body fields of both endpoints. Fields that change nothing in this engine are ignored."""

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
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage event; raises a 400 without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "Stream options can only be defined when `stream=True`.", "stream_options")
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class AnswerFormat(NamedTuple):
    """How an endpoint writes its answers.

    ``choice`` gives the fields of choice number i of a whole answer, ``chunks`` those of its events when
    token number j of choice i is there. Both leave out the index.
    """

    id_prefix: str
    object: str
    choice: Callable[[Prompt, int, Output], dict[str, Any]]
    chunks: Callable[[Prompt, int, Output, int], Iterable[dict[str, Any]]]


async def respond(
    service: Service,
    request: Request,
    body: Sampling,
    *,
    prompts: Sequence[Prompt],
    max_tokens: int | None,
    form: AnswerFormat,
) -> Response:
    """Generate ``body.n`` choices for each prompt; the answer as a stream or as a whole."""
    adapter = service.resolve(body.model)
    n = body.n or 1
    usage_of = n if body.include_usage else 0
    generation = service.generate(
        prompts,
        adapter=adapter,
        seed=body.seed,
        max_tokens=max_tokens,
        n=n,
        stops=body.stops,
        ignore_eos=body.ignore_eos,
        salt=body.cache_salt,
    )
    head = {
        "id": request_id(request, form.id_prefix),
        "object": form.object,
        "created": service.now(),
        "model": adapter or service.model,
    }
    if body.stream:
        stream = _stream(generation, head, form.chunks, usage_of)
        return EventStream(stream, lambda: service.abort(generation))
    await whole(request, generation, lambda: service.abort(generation))
    choices = [
        {
            "index": index,
            **form.choice(generation.prompts[index], index, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop,
        }
        for index, output in enumerate(generation.outputs)
    ]
    return answer({**head, "choices": choices, "usage": usage(generation, n)})


async def _stream(
    generation: Generation,
    head: dict[str, Any],
    chunks: Callable[[Prompt, int, Output, int], Iterable[dict[str, Any]]],
    usage_of: int,
) -> AsyncIterator[bytes]:
    async for index, position in generation.tokens():
        prompt, output = generation.prompts[index], generation.outputs[index]
        for chunk in chunks(prompt, index, output, position):
            yield event({**head, "choices": [{"index": index, **chunk}]})
    if usage_of:
        yield event({**head, "choices": [], "usage": usage(generation, usage_of)})
    yield DONE


def usage(generation: Generation, n: int = 1) -> dict[str, Any]:
    """Token counts of the answer; a prompt with ``n`` choices counts once."""
    prompt = sum(len(prompt.tokens) for prompt in generation.prompts[::n])
    completion = sum(len(output.deltas) for output in generation.outputs)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": sum(generation.cached[::n])},
    }


def logprob(position: int, rank: int = 0) -> float:
    """A plausible log probability in nats: deterministic, and lower for each further rank."""
    return -(0.01 + mix(position) % 1000 / 1000 + rank)
