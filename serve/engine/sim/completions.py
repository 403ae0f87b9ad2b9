"""``POST /v1/completions``, ``/tokenize`` and ``/detokenize`` of the simulated engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.chat import Message, template
from serve.engine.sim.generation_api import AnswerFormat, Sampling, logprob, respond
from serve.engine.sim.http import ApiError, answer, read
from serve.engine.sim.service import Service
from serve.engine.sim.text import Output, Prompt, token_bytes, token_id

Id = Annotated[int, Meta(ge=0)]
Prompts = str | list[str | int | list[int]]

# OpenAI's default for completions, and vLLM's.
_DEFAULT_MAX_TOKENS = 16


class CompletionRequest(Sampling, frozen=True, kw_only=True):
    """The body of a completion."""

    prompt: Prompts
    echo: bool | None = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids as ``/tokenize`` gives them."""

    model: str | None = None
    tokens: list[Id]


_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


def prompts_of(given: Prompts, param: str) -> list[Prompt]:
    """Texts or token ids, one or several; raises a 400 for a mixture or nothing."""
    if isinstance(given, str):
        return [Prompt.of_text(given)]
    if given and all(isinstance(item, int) for item in given):
        return [Prompt.of_ids([item for item in given if isinstance(item, int)])]
    prompts = []
    for item in given:
        if isinstance(item, str):
            prompts.append(Prompt.of_text(item))
        elif isinstance(item, list) and item:
            prompts.append(Prompt.of_ids(item))
        else:
            raise ApiError(400, f"{param} must be texts or lists of token ids", param)
    if not prompts:
        raise ApiError(400, f"{param} must not be empty", param)
    return prompts


async def completions(service: Service, request: Request) -> Response:
    """A completion of each prompt, as a stream or as a whole."""
    body = await read(request, _COMPLETION)
    unbounded = body.max_tokens is None and body.ignore_eos
    offsets: defaultdict[int, int] = defaultdict(int)

    def choice(prompt: Prompt, index: int, output: Output) -> dict[str, Any]:
        text = (_text(prompt) if body.echo else "") + output.text
        return {"text": text, "logprobs": _logprobs(body, output.deltas, 0, 0)}

    def chunks(prompt: Prompt, index: int, output: Output, position: int) -> Iterator[dict[str, Any]]:
        delta = output.deltas[position]
        last = position + 1 == len(output.deltas)
        yield {
            "text": (_text(prompt) if body.echo and position == 0 else "") + delta,
            "logprobs": _logprobs(body, [delta], position, offsets[index]),
            "finish_reason": output.finish_reason if last else None,
            "stop_reason": output.stop if last else None,
        }
        offsets[index] += len(delta)

    return await respond(
        service,
        request,
        body,
        prompts=prompts_of(body.prompt, "prompt"),
        max_tokens=None if unbounded else body.max_tokens or _DEFAULT_MAX_TOKENS,
        form=AnswerFormat("cmpl", "text_completion", choice, chunks),
    )


def _logprobs(body: CompletionRequest, tokens: list[str], start: int, offset: int) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {token + "'" * rank: logprob(position, rank) for rank in range(max(1, body.logprobs or 0))}
        for position, token in enumerate(tokens, start)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [logprob(position) for position in range(start, start + len(tokens))],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _text(prompt: Prompt) -> str:
    """The text of the prompt; empty for token ids of another tokenizer."""
    try:
        parts = [token_bytes(t) if isinstance(t, int) else t for t in prompt.tokens]
    except ValueError:
        return ""
    return b"".join(parts).decode(errors="replace")


async def tokenize(service: Service, request: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    body = await read(request, _TOKENIZE)
    service.resolve(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", "prompt")
    prompt = Prompt.of_text(body.prompt) if body.prompt is not None else template(body.messages or [])
    tokens = [token for token in prompt.tokens if isinstance(token, bytes) and token]
    strings = [token.decode(errors="replace") for token in tokens] if body.return_token_strs else None
    return answer(
        {
            "count": len(tokens),
            "max_model_len": service.max_model_len,
            "tokens": [token_id(token) for token in tokens],
            "token_strs": strings,
        }
    )


async def detokenize(service: Service, request: Request) -> Response:
    """The text of token ids."""
    body = await read(request, _DETOKENIZE)
    service.resolve(body.model)
    try:
        text = b"".join(token_bytes(number) for number in body.tokens)
    except ValueError as error:
        raise ApiError(400, str(error), "tokens") from None
    return answer({"prompt": text.decode(errors="replace")})
