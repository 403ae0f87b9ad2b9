"""The API of an endpoint: its requests, its models, the options it accepts, and how it counts tokens."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

import msgspec

from policy.errors import TidegateError, Unreachable
from sim.arrivals import Arrival
from tidegate.replay.http_client import ReplayConnectionPool, ResponseBody
from tidegate.replay.prompts import PromptGenerator, TokensPerWordFit
from tidegate.replay.response_timing import StreamTimings

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class RequestFormat:
    """The common part of a replay's requests.

    Requests name ``model``, unless the trace names an adapter or one of ``others``. ``exact`` forces the
    length of answers, which engines such as vLLM support.
    """

    model: str = ""
    others: frozenset[str] = frozenset()
    chat: bool = False
    exact: bool = True

    @property
    def path(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    def name(self, arrival: Arrival) -> str:
        """The model or adapter that a request names."""
        return arrival.adapter or (arrival.model if arrival.model in self.others else self.model)

    def body(self, name: str, prompt: str, output_tokens: int) -> bytes:
        """The request for ``output_tokens`` tokens of the model called ``name``."""
        body: dict[str, object] = {
            "model": name,
            "max_tokens": output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.exact:
            body |= {"ignore_eos": True, "min_tokens": output_tokens}
        return _encode(body)


# Two lengths give the tokens per word and per prompt. Both fit into small contexts.
_SHORT, _LONG = 64, 320


class EndpointRefused(TidegateError):
    """The endpoint answers, but does not serve a replay's requests."""


async def models_of(pool: ReplayConnectionPool) -> list[str]:
    """The models that the endpoint lists, at least one."""
    answer = ResponseBody()
    try:
        status = await pool.get("/v1/models", answer)
    except OSError as error:
        raise _unreachable(describe_error(error)) from None
    models = []
    with suppress(msgspec.MsgspecError, KeyError, TypeError):
        models = [str(model["id"]) for model in msgspec.json.decode(answer.body)["data"]]
    if status != 200 or not models:
        raise EndpointRefused(f"/v1/models answered {status} and names no model: say which with --model")
    return models


async def send(pool: ReplayConnectionPool, path: str, body: bytes) -> tuple[int, StreamTimings]:
    """Send one request; returns the status, 0 without an answer, and the timings, with the error if any."""
    timings = StreamTimings(sent_at=perf_counter())
    status = 0
    try:
        status = await pool.post(path, body, timings)
        timings.end(status)
    except OSError as error:
        timings.error = describe_error(error)
    return status, timings


def describe_error(error: OSError) -> str:
    """Its message, or its type without one."""
    return str(error) or type(error).__name__


def _unreachable(error: str) -> Unreachable:
    return Unreachable(f"the endpoint does not answer: {error}")


async def probe(
    pool: ReplayConnectionPool, request_format: RequestFormat, seed: int
) -> tuple[RequestFormat, TokensPerWordFit]:
    """The request format that the endpoint accepts, and how many tokens it counts for words.

    If it answers 400 to ``ignore_eos`` and ``min_tokens``, answers are as long as the model makes them. If it
    counts no tokens, each word is one. Raises :class:`EndpointRefused` with its error, and ``Unreachable``.
    """
    prompts = PromptGenerator(seed)
    short = Arrival(at=0.0, input_tokens=_SHORT, output_tokens=1)
    status, first = await _probe_length(pool, request_format, prompts.text(short, -1))
    if status == 400 and request_format.exact:
        request_format = replace(request_format, exact=False)
        status, first = await _probe_length(pool, request_format, prompts.text(short, -1))
    if first.error:
        raise EndpointRefused(f"{request_format.path} answered {status}: {first.error}")
    if not first.input_tokens:
        return request_format, TokensPerWordFit()
    _, longer = await _probe_length(
        pool, request_format, prompts.text(short._replace(input_tokens=_LONG), -2)
    )
    if longer.input_tokens <= first.input_tokens:
        return request_format, TokensPerWordFit()
    per_word = (longer.input_tokens - first.input_tokens) / (_LONG - _SHORT)
    return request_format, TokensPerWordFit(max(first.input_tokens - per_word * _SHORT, 0.0), per_word)


async def _probe_length(
    pool: ReplayConnectionPool, request_format: RequestFormat, prompt: str
) -> tuple[int, StreamTimings]:
    status, timings = await send(
        pool, request_format.path, request_format.body(request_format.model, prompt, 1)
    )
    if not status:
        raise _unreachable(timings.error)
    return status, timings
