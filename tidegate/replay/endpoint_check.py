"""What is asked of an endpoint before a replay: its model, what it takes, and how it counts tokens."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from policy.errors import TidegateError, Unreachable
from sim.arrival import Arrival
from tidegate.replay.http_client import Pool, WholeBody
from tidegate.replay.prompts import Fit, Prompts
from tidegate.replay.request_format import RequestFormat
from tidegate.replay.stream_reader import StreamTimings

T = TypeVar("T")

# Two lengths give what words cost and what every prompt costs besides. They fit into small contexts.
_SHORT, _LONG = 64, 320


class EndpointRefused(TidegateError):
    """The endpoint answers, and not as a replay needs it."""


class _Card(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Card]


async def models_of(pool: Pool) -> list[str]:
    """The models that the endpoint lists, of which there is one at least."""
    answer = WholeBody()
    status = await _reached(pool.get("/v1/models", answer))
    try:
        models = msgspec.json.decode(answer.body, type=_Models).data
    except msgspec.MsgspecError:
        models = []
    if status != 200 or not models:
        raise EndpointRefused(f"/v1/models answered {status} and names no model: say which with --model")
    return [model.id for model in models]


async def probe(pool: Pool, asking: RequestFormat, seed: int) -> tuple[RequestFormat, Fit]:
    """How to ask this endpoint, and how many tokens it makes of words.

    Where it answers 400 to ``ignore_eos`` and ``min_tokens``, the answers will be as long as the model makes
    them. Where it counts no tokens, each word is taken for one. Raises :class:`EndpointRefused` with its
    own words where it serves no request, and ``Unreachable`` where it does not answer.
    """
    prompts = Prompts(seed)
    short = Arrival(at=0.0, input_tokens=_SHORT, output_tokens=1)
    status, first = await _ask(pool, asking, prompts.text(short, -1))
    if status == 400 and asking.exact:
        asking = replace(asking, exact=False)
        status, first = await _ask(pool, asking, prompts.text(short, -1))
    if first.error:
        raise EndpointRefused(f"{asking.path} answered {status}: {first.error}")
    if not first.input_tokens:
        return asking, Fit()
    _, longer = await _ask(pool, asking, prompts.text(short._replace(input_tokens=_LONG), -2))
    if longer.input_tokens <= first.input_tokens:
        return asking, Fit()
    per_word = (longer.input_tokens - first.input_tokens) / (_LONG - _SHORT)
    return asking, Fit(max(first.input_tokens - per_word * _SHORT, 0.0), per_word)


async def _ask(pool: Pool, asking: RequestFormat, prompt: str) -> tuple[int, StreamTimings]:
    reading = StreamTimings()
    status = await _reached(pool.post(asking.path, asking.body(asking.model, prompt, 1), reading))
    reading.end(status)
    return status, reading


async def _reached(answer: Coroutine[Any, Any, T]) -> T:
    try:
        return await answer
    except OSError as error:
        raise Unreachable(f"the endpoint does not answer: {error or type(error).__name__}") from None
