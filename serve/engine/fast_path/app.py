"""The engine's app: chat completions and completions that the fast path knows, and vLLM's app for the rest.

A request is validated, rendered and turned into sampling parameters by vLLM's own code, called as its
routes call it (``entrypoints/openai/{chat_completion,completion}/api_router.py``, 0.32). What its model of a
request does not accept goes to vLLM's app, body included, so every error is vLLM's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, NamedTuple

from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers import PreTrainedTokenizerBase, TokenizersBackend
from vllm import envs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.parser.abstract_parser import DelegatingParser
from vllm.renderers.hf import HfRenderer, safe_apply_chat_template
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.stats import IterationStats

from serve.engine.fast_path.eligibility import CHAT, COMPLETION, eligible
from serve.engine.fast_path.engine_core_sockets import CoreReader
from serve.engine.fast_path.event_templates import AnswerKind
from serve.engine.fast_path.output_iterator import EngineOutputs
from serve.engine.fast_path.plain_http_writer import PlainHttpWriter
from serve.engine.fast_path.short_prompts import MAX_BODY, SHORT, render_short_prompts
from serve.engine.fast_path.stream import StreamedAnswer, StreamedAnswers
from serve.engine.interface import WRITER, ASGIApp, Message, Receive, ResponseWriter, Scope, Send

# The middlewares of vLLM's app that leave such a request alone. Its arguments may bring others.
_MIDDLEWARES = frozenset({"CORSMiddleware", "ScalingMiddleware", "PrometheusInstrumentatorMiddleware"})
# Adapters come and go, and each has kinds of answers of its own.
_MOST_KINDS = 1024


class FastPathRoute(NamedTuple):
    """What differs between the two APIs: vLLM's code, and the field of an event that holds its text.

    ``skip_empty``: vLLM leaves out the events without text. ``suffix`` is what the engine's id of a request
    has beyond that of its answer.
    """

    model: Any
    serving: Any
    method: str
    field: str
    skip_empty: bool = False
    suffix: str = ""


class Submission(NamedTuple):
    """The arguments of a call of ``AsyncLLM.generate``, and what it returned."""

    prompt: Any
    params: Any
    request_id: str
    options: dict[str, Any]
    outputs: EngineOutputs


class DeferringClient:
    """vLLM's engine client for one stream: it keeps the call of ``generate`` instead of making it."""

    submission: Submission

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompt: Any, params: Any, request_id: str, **options: Any) -> EngineOutputs:
        """Raises ``VLLMValidationError`` for parameters that the engine must not serve."""
        self._llm.refuse(params)
        outputs = EngineOutputs()
        self.submission = Submission(prompt, params, request_id, options, outputs)
        return outputs


class FastPath:
    """ASGI app over vLLM's ``app`` and its engine ``llm``, whose ``steps`` are read here; see the module."""

    def __init__(self, llm: Any, app: Any, steps: CoreReader | None) -> None:
        self._llm = llm
        self._app: Any = app
        self._routes = _routes(app.state)
        self._kinds: dict[tuple[str, str | None, str | None, bool], AnswerKind] = {}
        # Such an answer has counts of its own, which vLLM does not tell before its last output.
        observed = llm.vllm_config.observability_config
        self._has_kinds = observed.per_request_spec_decode_metrics == "none"
        self._answers = StreamedAnswers(EngineCoreOutput(request_id="", new_token_ids=[]))
        _process_first(self._answers, llm.output_processor)
        if steps is not None:
            steps.take_steps(partial(_take_step, self._answers, llm))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if route is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = await _read(receive)
        if body is None:
            return
        SHORT.set(len(body) <= MAX_BODY)
        request = _request(route, scope, body)
        if request is None:
            await self._app(scope, _Replay(body, receive), send)
            return
        # As vLLM's app does; its handlers of errors read it.
        scope["app"] = self._app
        writer: ResponseWriter | None = scope.get("extensions", {}).get(WRITER)
        if writer is not None:
            await self._serve(route, request, scope, writer)
        else:
            async with PlainHttpWriter(receive, send) as writer:
                await self._serve(route, request, scope, writer)

    async def _serve(self, route: FastPathRoute, request: Any, scope: Scope, writer: ResponseWriter) -> None:
        serving, client = route.serving, DeferringClient(self._llm)
        if request.stream:
            serving = copy.copy(serving)
            serving.engine_client = client
        try:
            # Left without an error when it expires, which is when the client leaves.
            async with asyncio.timeout(None) as presence:
                writer.on_abort(partial(_expire, presence))
                try:
                    response = await getattr(serving, route.method)(request, Request(scope))
                except Exception as error:  # noqa: BLE001 - vLLM has an answer for each
                    await self._fail(scope, writer, error)
                    return
                if request.stream and not isinstance(response, ErrorResponse):
                    await self._stream(route, request, client.submission, response, writer)
                    return
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    # vLLM makes an answer of it.
                    raise asyncio.CancelledError
                _answer(writer, response)
        except TimeoutError:
            if not presence.expired():
                raise

    async def _stream(
        self,
        route: FastPathRoute,
        request: Any,
        submission: Submission,
        events: AsyncGenerator[str, None],
        writer: ResponseWriter,
    ) -> None:
        """Submit a request to the engine, and return when its answer is written."""
        prompt, params, request_id, options, outputs = submission
        states = self._llm.output_processor.request_states
        ended = asyncio.Event()
        answer = StreamedAnswer(
            events, outputs, writer,
            field=route.field, skip_empty=route.skip_empty, done=ended.set,
            failure=partial(_failure, self._llm, params),
            kind=self._kind(route, request, submission), answer_id=request_id.removesuffix(route.suffix),
            created=int(time.time()),
        )  # fmt: skip
        answer.begin()
        queue = None
        try:
            try:
                queue = await self._llm.add_request(request_id, prompt, params, **options)
            except Exception as error:  # noqa: BLE001 - vLLM sends it as an event, as it reads the first output
                answer.put(error)
                return
            state = states.get(queue.request_id)
            # What came meanwhile.
            if queue.output is not None:
                answer.put(queue.output)
            if state is not None and answer.follow(state):
                self._answers.add(queue.request_id, answer)
            await ended.wait()
        finally:
            answer.close()
            if queue is not None:
                self._answers.remove(queue.request_id)
            if queue is not None and queue.request_id in states:
                await self._llm.abort(queue.request_id, internal=True)

    def _kind(self, route: FastPathRoute, request: Any, submission: Submission) -> AnswerKind | None:
        """The kind of the answer, ``None`` if its events may differ in more than those of a kind do."""
        # Media are part of the usage; without a prompt for its answer a chat repeats the last role.
        if submission.prompt.get("type") != "token" or not getattr(request, "add_generation_prompt", True):
            return None
        if not (self._has_kinds and submission.request_id.isascii()):
            return None
        options = request.stream_options
        # vLLM may choose an adapter by the parts of a message.
        adapter = submission.options.get("lora_request")
        name = None if adapter is None else adapter.lora_name
        key = (route.field, request.model, name, bool(options and options.include_usage))
        if key not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        return self._kinds.setdefault(key, AnswerKind())

    async def _fail(self, scope: Scope, writer: ResponseWriter, error: Exception) -> None:
        """Answer as the handlers of vLLM's app do for ``error``."""

        async def fail(*_: Any) -> None:
            raise error

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                writer.start(message["status"], message["headers"])
            else:
                writer.end(message["body"])

        await ExceptionMiddleware(fail, handlers=self._app.exception_handlers)(scope, _nothing, send)


class _Replay:
    """``receive`` of a request whose body has been read."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def fast_path(llm: Any, app: Any, steps: CoreReader | None) -> ASGIApp:
    """``app`` with the fast path before it, unless vLLM's arguments ask for what that does not do.

    ``steps`` reads the outputs of the engine core of ``llm``, where that is possible.
    """
    # As vLLM's engine core does; otherwise each token reads the environment.
    envs.enable_envs_cache()
    args = app.state.args
    unknown = {middleware.cls.__name__ for middleware in app.user_middleware} - _MIDDLEWARES
    differs = (
        args.enable_force_include_usage,
        args.enable_log_outputs,
        args.enable_server_load_tracking,
        args.sse_keep_alive_interval,
    )
    wanted = not unknown and not any(differs)
    # transformers looks it up anew for each request.
    eos_token_id = llm.renderer.get_eos_token_id()
    llm.renderer.get_eos_token_id = lambda: eos_token_id
    if wanted and type(llm.renderer) is HfRenderer and not args.trust_request_chat_template:
        render_short_prompts(llm.renderer, safe_apply_chat_template, _backend(llm.renderer.tokenizer))
    return FastPath(llm, app, steps) if wanted else app


def _backend(tokenizer: Any) -> Any:
    """What makes the tokens for a ``tokenizer`` of transformers, where that adds nothing; else ``None``."""
    # vLLM's pool gives texts to its copies: the settings of its own backend stay as they are.
    if not isinstance(tokenizer, ThreadSafeHFTokenizerMixin) or not isinstance(tokenizer, TokenizersBackend):
        return None
    # The pool's own call is around that of the class before it.
    call: Any = super(type(tokenizer), tokenizer).__call__
    usual = (PreTrainedTokenizerBase.__call__, TokenizersBackend._encode_plus)
    backend = tokenizer._tokenizer
    differs = (
        (call.__func__, type(tokenizer)._encode_plus) != usual,
        backend.truncation,
        backend.padding,
        backend.encode_special_tokens != tokenizer.split_special_tokens,
    )
    return None if any(differs) else backend


def _process_first(answers: StreamedAnswers, processor: Any) -> None:
    """Have ``answers`` take the outputs of the engine before vLLM's output ``processor``."""
    process = processor.process_outputs

    def processed(
        outputs: list[Any], at: float | None = None, stats: Any = None, weight_version: str | None = None
    ) -> Any:
        """As ``OutputProcessor.process_outputs``."""
        left = outputs if at is None else answers.take(outputs, at, stats, weight_version)
        return process(left, at, stats, weight_version)

    processor.process_outputs = processed


def _take_step(answers: StreamedAnswers, llm: Any, step: Any) -> bool:
    """Do with a ``step`` that brings nothing but tokens to ``answers`` what vLLM's handler of outputs does.

    Returns false, having done nothing, if it brings something else.
    """
    outputs = step.outputs
    if not outputs or not answers.takes_all(outputs, step.weight_version):
        return False
    stats = IterationStats() if llm.log_stats else None
    answers.take(outputs, step.timestamp, stats, step.weight_version)
    llm.output_processor.update_scheduler_stats(step.scheduler_stats)
    if llm.logger_manager is not None:
        llm.logger_manager.record(
            engine_idx=step.engine_index,
            scheduler_stats=step.scheduler_stats,
            iteration_stats=stats,
            mm_cache_stats=llm.renderer.stat_mm_cache(),
        )
    return True


def _routes(state: Any) -> dict[str, FastPathRoute]:
    routes = {}
    chat = getattr(state, "openai_serving_chat", None)
    if chat is not None and (chat.parser_cls is None or _leaves_text(chat.parser_cls)):
        skips = chat.parser_cls is not None
        routes[CHAT] = FastPathRoute(ChatCompletionRequest, chat, "create_chat_completion", "content", skips)
    completion = getattr(state, "openai_serving_completion", None)
    if completion is not None:
        routes[COMPLETION] = FastPathRoute(
            CompletionRequest, completion, "create_completion", "text", suffix="-0"
        )
    return routes


def _leaves_text(parser: Any) -> bool:
    """Whether vLLM's ``parser`` class passes on the text of a request without tools as it is."""
    return (
        parser.__bases__ == (DelegatingParser,)
        and parser.reasoning_parser_cls is None
        and not parser.tool_parser_cls.engine_based_streaming
    )


def _request(route: FastPathRoute, scope: Scope, body: bytes) -> Any:
    """The request, validated by vLLM's model, or ``None`` if it is for vLLM's app."""
    headers = scope["headers"]
    content_type = next((value for name, value in headers if name == b"content-type"), b"")
    if content_type.lower().split(b";", 1)[0] != b"application/json":
        return None
    try:
        decoded = json.loads(body)
        return route.model.model_validate(decoded) if eligible(scope["path"], headers, decoded) else None
    except Exception:  # noqa: BLE001 - whatever is wrong, vLLM's app says it
        return None


def _expire(presence: asyncio.Timeout) -> None:
    # It is over when a client leaves that had not read the end yet.
    with contextlib.suppress(RuntimeError):
        presence.reschedule(asyncio.get_running_loop().time())


def _answer(writer: ResponseWriter, response: Any) -> None:
    """Write vLLM's object of a whole answer or of an error, as its routes do."""
    status = response.error.code if isinstance(response, ErrorResponse) else 200
    rendered = JSONResponse(response.model_dump(), status)
    writer.start(status, rendered.raw_headers)
    writer.end(bytes(rendered.body))


def _failure(llm: Any, params: Any, output: Any) -> Exception | None:
    """What ``generate`` of ``llm`` raises at this ``output``, which may be an error of the engine."""
    if not isinstance(output, Exception):
        return llm.refusal(params, output)  # type: ignore[no-any-return]
    if isinstance(output, (EngineDeadError, VLLMClientError, GracefulHTTPError)):
        return output  # type: ignore[no-any-return]
    failed: Exception = EngineGenerateError()
    failed.__cause__ = output
    return failed


async def _read(receive: Receive) -> bytes | None:
    """The body of a request, or ``None`` if the client left before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
