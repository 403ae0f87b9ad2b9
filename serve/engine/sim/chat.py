"""``POST /v1/chat/completions`` of the simulated engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.generation_api import AnswerFormat, Positive, Sampling, logprob, respond
from serve.engine.sim.http import ApiError, read
from serve.engine.sim.service import Service
from serve.engine.sim.text import Output, Prompt


class Message(msgspec.Struct, frozen=True):
    """One message of a conversation; content parts must be text."""

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


async def chat(service: Service, request: Request) -> Response:
    """A chat completion, as a stream or as a whole."""
    body = await read(request, _DECODER)

    def choice(prompt: Prompt, index: int, output: Output) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": output.text,
            "refusal": None,
            "tool_calls": [],
        }
        return {"message": message, "logprobs": _logprobs(body, output.deltas, 0)}

    def chunks(prompt: Prompt, index: int, output: Output, position: int) -> Iterator[dict[str, Any]]:
        if position == 0:
            role = {"role": "assistant", "content": ""}
            yield {"delta": role, "logprobs": None, "finish_reason": None}
        delta = output.deltas[position]
        last = position + 1 == len(output.deltas)
        yield {
            "delta": {"content": delta},
            "logprobs": _logprobs(body, [delta], position),
            "finish_reason": output.finish_reason if last else None,
            **({"stop_reason": output.stop} if last else {}),
        }

    form = AnswerFormat(
        "chatcmpl", "chat.completion.chunk" if body.stream else "chat.completion", choice, chunks
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    return await respond(
        service, request, body, prompts=[template(body.messages)], max_tokens=max_tokens, form=form
    )


def _logprobs(body: ChatRequest, tokens: list[str], start: int) -> dict[str, Any] | None:
    if not body.logprobs:
        return None

    def entry(token: str, position: int, rank: int) -> dict[str, Any]:
        # Alternatives are the token in other spellings, so that no vocabulary is needed.
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
