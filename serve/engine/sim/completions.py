"""``POST /v1/chat/completions``, ``/v1/completions`` and ``/[de]tokenize`` of the simulated engine."""

from __future__ import annotations

import codecs
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from serve.engine.sim.chat_template import ChatMessage, chat_turns, prompt_of
from serve.engine.sim.generation_service import GenerationService, call_id, now, request_id
from serve.engine.sim.http_exchange import DONE, ApiError, answer, event, read, respond
from serve.engine.sim.prompt_input import Prompts, prompts_of
from serve.engine.sim.pseudo_tokenizer import GeneratedText, TokenizedPrompt, mix, token_bytes, token_id
from serve.engine.sim.sampling_parameters import (
    GenerationFields,
    Id,
    Positive,
    check_end,
    check_prompt_logprobs,
)
from serve.engine.sim.step_loop import Generation
from serve.engine.sim.tool_calls import Tool, ToolSet, tools_of

# OpenAI's default for completions, and vLLM's.
_DEFAULT_MAX_TOKENS = 16


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    include_usage: bool | UnsetType | None = UNSET
    continuous_usage_stats: bool | UnsetType | None = UNSET


class StreamingGenerationFields(GenerationFields, frozen=True, kw_only=True):
    """Body fields that both kinds of completion share."""

    stream: bool | None = False
    stream_options: StreamOptions | None = None


class ChatRequest(StreamingGenerationFields, frozen=True, kw_only=True):
    """The body of a chat completion."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None


class CompletionRequest(StreamingGenerationFields, frozen=True, kw_only=True):
    """The body of a completion."""

    prompt: Prompts
    max_tokens: Id | None = None
    suffix: str | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_embeds: str | list[str] | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids as ``/tokenize`` gives them."""

    model: str | None = None
    tokens: list[Id]


_CHAT = msgspec.json.Decoder(ChatRequest, strict=False)
_COMPLETION = msgspec.json.Decoder(CompletionRequest, strict=False)
_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


class AnswerFormat(NamedTuple):
    """How an endpoint writes its answers.

    ``choice`` gives the fields of a choice of a whole answer, ``chunk`` those of the event of the token at a
    position; both without index and end. ``unfinished`` are the end fields of an event that is not the last
    of its choice, ``first`` gives the fields of events before its first token. ``tools`` may be called.
    """

    id_prefix: str
    object: str
    choice: Callable[[TokenizedPrompt, GeneratedText], dict[str, Any]]
    chunk: Callable[[TokenizedPrompt, GeneratedText, int], dict[str, Any]]
    unfinished: dict[str, None]
    first: Callable[[int, GeneratedText], Sequence[dict[str, Any]]] = lambda index, output: ()
    tools: ToolSet | None = None


async def _complete(
    service: GenerationService,
    request: Request,
    body: StreamingGenerationFields,
    prompts: Sequence[TokenizedPrompt],
    form: AnswerFormat,
) -> Response:
    if body.stream_options not in (None, StreamOptions()) and not body.stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", "stream_options")
    generation = service.generate(prompts, body, form.tools)
    n = body.n or 1
    head = {
        "id": request_id(request, form.id_prefix),
        "object": form.object,
        "created": now(),
        "model": generation.model,
    }

    def whole() -> dict[str, Any]:
        choices = [
            {"index": index, **form.choice(prompt, output), **_end(output)}
            for index, (prompt, output) in enumerate(zip(generation.prompts, generation.outputs, strict=True))
        ]
        return {**head, "choices": choices, "usage": _usage(generation, n)}

    async def events() -> AsyncIterator[bytes]:
        def chunk(index: int, fields: dict[str, Any], end: dict[str, Any]) -> bytes:
            return event({**head, "choices": [{"index": index, **fields, **end}]})

        async for index, position in generation.tokens():
            prompt, output = generation.prompts[index], generation.outputs[index]
            if position == 0:
                for fields in form.first(index, output):
                    yield chunk(index, fields, form.unfinished)
            last = position + 1 == len(output.deltas)
            yield chunk(
                index, form.chunk(prompt, output, position), _end(output) if last else form.unfinished
            )
        if body.stream_options is not None and body.stream_options.include_usage not in (None, False, UNSET):
            yield event({**head, "choices": [], "usage": _usage(generation, n)})
        yield DONE

    return await respond(request, generation, whole, events() if body.stream else None)


def _end(output: GeneratedText) -> dict[str, Any]:
    reason = "tool_calls" if output.tool and output.finish_reason == "stop" else output.finish_reason
    return {"finish_reason": reason, "stop_reason": output.stop}


def _usage(generation: Generation, n: int) -> dict[str, Any]:
    """Token counts of the answer; a prompt with ``n`` choices counts once."""
    prompt = sum(len(prompt.tokens) for prompt in generation.prompts[::n])
    completion = sum(len(output.deltas) for output in generation.outputs)
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": sum(generation.cached[::n])},
    }


async def chat(service: GenerationService, request: Request) -> Response:
    """A chat completion, as a stream or as a whole."""
    body = await read(request, _CHAT)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    check_prompt_logprobs(
        body,
        (body.top_logprobs or 0) if body.echo else None,
        logprobs=bool(body.logprobs),
        stream=bool(body.stream),
        has_adapters=service.has_adapters,
    )
    if body.chat_template is not None:
        raise ApiError(400, "a chat template in a request is not trusted", "chat_template")
    begins, goes_on = body.add_generation_prompt, body.continue_final_message
    check_end(begins=begins, goes_on=goes_on)
    turns = chat_turns(body.messages)
    echoed = turns[-1].text if body.echo and turns[-1].role == "assistant" else ""

    def called(output: GeneratedText, arguments: str) -> dict[str, Any]:
        """A call of a tool; in a stream its arguments follow in parts."""
        function = {"name": output.tool, "arguments": arguments}
        return {"id": call_id(), "function": function, "type": "function"}

    def choice(_: TokenizedPrompt, output: GeneratedText) -> dict[str, Any]:
        text = echoed + ("" if output.tool else output.text)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not output.tool else None,
            "refusal": None,
            "tool_calls": [called(output, output.text)] if output.tool else [],
        }
        return {"message": message, "logprobs": _chat_logprobs(body, output.deltas, 0)}

    def first(_: int, output: GeneratedText) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if echoed:
            deltas.append({"content": echoed})
        if output.tool:
            deltas.append({"tool_calls": [{"index": 0, **called(output, "")}]})
        return [{"delta": delta, "logprobs": None} for delta in deltas]

    def chunk(_: TokenizedPrompt, output: GeneratedText, position: int) -> dict[str, Any]:
        text = output.deltas[position]
        part: dict[str, Any] = {"index": 0, "function": {"arguments": text}}
        delta = {"tool_calls": [part]} if output.tool else {"content": text}
        return {"delta": delta, "logprobs": _chat_logprobs(body, [text], position)}

    form = AnswerFormat(
        "chatcmpl",
        "chat.completion.chunk" if body.stream else "chat.completion",
        choice,
        chunk,
        unfinished={"finish_reason": None},
        first=first,
        tools=tools_of(body.tools, body.tool_choice),
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    sampling = msgspec.structs.replace(body, max_tokens=max_tokens)
    defined = [msgspec.to_builtins(tool) for tool in body.tools or ()]
    prompt = prompt_of(turns, defined, begins=begins, goes_on=goes_on)
    return await _complete(service, request, sampling, [prompt], form)


def _chat_logprobs(body: ChatRequest, tokens: list[str], start: int) -> dict[str, Any] | None:
    if not body.logprobs:
        return None

    def entry(token: str, position: int, rank: int) -> dict[str, Any]:
        # Alternatives are the token in other spellings, so that no vocabulary is needed.
        spelled = token + "'" * rank
        return {"token": spelled, "logprob": _logprob(position, rank), "bytes": list(spelled.encode())}

    content = [
        {
            **entry(token, position, 0),
            "top_logprobs": [entry(token, position, rank) for rank in range(body.top_logprobs or 0)],
        }
        for position, token in enumerate(tokens, start)
    ]
    return {"content": content}


async def completions(service: GenerationService, request: Request) -> Response:
    """A completion of each prompt, as a stream or as a whole."""
    body = await read(request, _COMPLETION)
    if body.logprobs is not None and isinstance((await request.json())["logprobs"], str):
        raise ApiError(400, "`logprobs` must be an integer.", "logprobs")
    if body.suffix is not None:
        why = "Echo is unsupported with suffix." if body.echo else "suffix is only supported for FIM models"
        raise ApiError(400, why, "suffix")
    if body.prompt_embeds is not None:
        raise ApiError(400, "`prompt_embeds` needs `--enable-prompt-embeds`.", "prompt_embeds")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens must be at least 1, got 0.", "max_tokens")
    check_prompt_logprobs(
        body,
        body.logprobs if body.echo else None,
        logprobs=body.logprobs is not None,
        stream=bool(body.stream),
        has_adapters=service.has_adapters,
    )
    if body.truncate_prompt_tokens == 0:
        raise ApiError(400, "The decoder prompt cannot be empty", "prompt")
    # With echo and no tokens the prompt is the answer, although an engine generates one token.
    only_echo = body.max_tokens == 0

    pieces_of = functools.cache(_pieces)  # once per prompt, not for every token

    def shown(prompt: TokenizedPrompt, output: GeneratedText, start: int, end: int) -> dict[str, Any]:
        echoed = pieces_of(prompt) if body.echo else []
        tokens = [*([] if start else echoed), *([] if only_echo else output.deltas[start:end])]
        before = [*echoed, *output.deltas[:start]] if start and body.logprobs is not None else []
        return {"text": "".join(tokens), "logprobs": _logprobs(body, tokens, before)}

    def choice(prompt: TokenizedPrompt, output: GeneratedText) -> dict[str, Any]:
        return shown(prompt, output, 0, len(output.deltas))

    def chunk(prompt: TokenizedPrompt, output: GeneratedText, position: int) -> dict[str, Any]:
        return shown(prompt, output, position, position + 1)

    form = AnswerFormat(
        "cmpl", "text_completion", choice, chunk, unfinished={"finish_reason": None, "stop_reason": None}
    )
    prompts = prompts_of(body.prompt, "prompt")
    if only_echo:
        body = msgspec.structs.replace(body, max_tokens=1)
    elif not body.ignore_eos:
        body = msgspec.structs.replace(body, max_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS)
    return await _complete(service, request, body, prompts, form)


def _logprobs(body: CompletionRequest, tokens: list[str], before: list[str]) -> dict[str, Any] | None:
    """Of the tokens that follow those ``before``; the first token of a prompt has none."""
    if body.logprobs is None:
        return None
    start = len(before)
    positions = range(start, start + len(tokens))
    unknown = 1 if body.echo and start == 0 else 0
    return {
        "tokens": tokens,
        "token_logprobs": [None if position < unknown else _logprob(position) for position in positions],
        "top_logprobs": [
            None
            if position < unknown
            else {token + "'" * rank: _logprob(position, rank) for rank in range(max(1, body.logprobs))}
            for position, token in zip(positions, tokens, strict=True)
        ],
        "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=sum(map(len, before)))),
    }


def _logprob(position: int, rank: int = 0) -> float:
    """A plausible log probability in nats: deterministic, and lower for each further rank."""
    return -(0.01 + mix(position) % 1000 / 1000 + rank)


def _pieces(prompt: TokenizedPrompt) -> list[str]:
    """The text of the prompt by tokens; empty for token ids of another tokenizer.

    A character over two tokens is in the last.
    """
    parts: list[bytes] = []
    for token in prompt.tokens:
        part = token_bytes(token) if isinstance(token, int) else token
        if part is None:
            return []
        parts.append(part)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(part) for part in parts]
    return [*pieces[:-1], pieces[-1] + decoder.decode(b"", final=True)] if pieces else []


async def tokenize(service: GenerationService, request: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    body = await read(request, _TOKENIZE)
    service.resolve(body.model)
    if body.prompt is None and body.messages is None:
        raise ApiError(400, "give either prompt or messages", "prompt")
    begins, goes_on = body.add_generation_prompt, body.continue_final_message
    check_end(begins=begins, goes_on=goes_on)
    prompt = (
        TokenizedPrompt.of_text(body.prompt)
        if body.prompt is not None
        else prompt_of(chat_turns(body.messages or []), begins=begins, goes_on=goes_on)
    )
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


async def detokenize(service: GenerationService, request: Request) -> Response:
    """The text of token ids; as in vLLM an unknown one has none."""
    body = await read(request, _DETOKENIZE)
    service.resolve(body.model)
    text = b"".join(token_bytes(number) or b"" for number in body.tokens)
    return answer({"prompt": text.decode(errors="replace")})
