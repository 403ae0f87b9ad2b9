"""vLLM as an engine: its ``AsyncLLM`` and its own OpenAI app, in this process.

With the other ``vllm_*`` modules the only one that imports vLLM. Source of the calls: vLLM's
``entrypoints/launchers/api_server/entry.py`` (0.32), whose server we replace by our guard's.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from policy.engine.performance_model import BatchLimits, Timing
from policy.engine.step_samples import StepSample
from policy.errors import AdapterRefused, EngineFailed
from policy.routing.engine_prefix_index import KvBlockIndex
from serve.engine import vllm_torch_trace
from serve.engine.fast_path.app import fast_path
from serve.engine.fast_path.engine_core_sockets import exchange_directly
from serve.engine.grammar_limits import excess, is_grammar_failure
from serve.engine.interface import ASGIApp, EngineSpec, EngineStats
from serve.engine.vllm_arguments import USAGE, arguments, configuration, starting
from serve.engine.vllm_kv_events import KvEvents, followed
from serve.engine.vllm_stat_logger import StepLogger, StepMetrics

# Poll interval while the last request of an adapter ends.
LEAVING_S = 0.01
# How an error in the stream of a chat begins (vLLM's ``create_streaming_error_response``); it takes one line.
CHAT_ERROR = 'data: {"error":'


class NoAllowedToken(GenerationError):  # type: ignore[misc]  # vLLM ships no types
    """The constraints of a request's output allow no further token; vLLM itself answers 500."""

    def __init__(self) -> None:
        super().__init__("the structured output and the other parameters allow no further token")
        self.status_code = HTTPStatus.BAD_REQUEST


class CheckedLLM(AsyncLLM):  # type: ignore[misc]  # vLLM ships no types
    """``AsyncLLM``, except that it refuses requests that would end it, and all that it refuses at once.

    A refusal is an answer of 400 that names the parameter. vLLM itself validates parameters when the answer
    is first read: a stream is open by then, and two of its APIs have no way to say in it what is wrong.
    """

    def generate(self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """vLLM's entrance of a request to generate."""
        self.refuse(sampling_params)
        outputs = super().generate(prompt, sampling_params, *args, **kwargs)
        return (
            outputs
            if sampling_params.structured_outputs is None
            else constrained(self, outputs, sampling_params)
        )

    async def _add_request(self, request: Any, *args: Any) -> None:
        """As vLLM's, which leaves a request of one answer registered that it cannot send."""
        try:
            await super()._add_request(request, *args)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    def refusal(self, params: Any, output: Any) -> Exception | None:
        """The error that a request with ``params`` raises at this ``output``, if it is not vLLM's own."""
        if params.structured_outputs is None or all(each.finish_reason != "error" for each in output.outputs):
            return None
        kv = self.vllm_config.kv_transfer_config
        loads = kv is not None and kv.kv_load_failure_policy == "fail"
        by_grammar = is_grammar_failure(
            output, loads=loads or self.vllm_config.ec_transfer_config is not None
        )
        if by_grammar is None:
            # Another replica tries it, and neither is taken for a failing one.
            return RetryableRequestError()  # type: ignore[no-any-return]
        return NoAllowedToken() if by_grammar else None

    def refuse(self, params: Any) -> None:
        """Raise :class:`VLLMValidationError` for parameters that the engine cannot or must not serve."""
        config = self.vllm_config
        check(params, adapters=config.lora_config is not None)
        params.verify(
            config.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            self.input_processor.tokenizer,
        )


async def constrained(llm: CheckedLLM, outputs: AsyncGenerator[Any, None], params: Any) -> AsyncIterator[Any]:
    """The ``outputs`` of a request with a grammar; raises :class:`NoAllowedToken` where that allows no
    token, and ``RetryableRequestError`` where that or a failed load from another cache ended it.
    """
    async with aclosing(outputs):
        async for output in outputs:
            if (error := llm.refusal(params, output)) is not None:
                raise error
            yield output


def refuse_early(responses: Any, llm: CheckedLLM) -> None:
    """Have vLLM's responses API refuse parameters before it opens a stream, as its other APIs do."""
    generate = responses._generate_with_builtin_tools

    def checked(*, sampling_params: Any, **kwargs: Any) -> Any:
        llm.refuse(sampling_params)
        return generate(sampling_params=sampling_params, **kwargs)

    responses._generate_with_builtin_tools = checked


def send_stream_errors(responses: Any) -> None:
    """Have vLLM's responses API send the error of a stream, in the form of its other APIs.

    vLLM itself validates that error as one of the events of this API, which fails and cuts the stream.
    """
    generate = responses.responses_stream_generator

    def raised(error: GenerationError) -> None:
        raise error

    async def sent(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(generate(*args, **kwargs)) as events:
            try:
                async for event in events:
                    yield event
            except GenerationError as error:
                yield create_error_response(error)

    responses._convert_generation_error_to_streaming_response = raised
    responses.responses_stream_generator = sent


def send_message_errors(messages: Any) -> None:
    """Have vLLM's messages API send the error of a stream with its status, as its other APIs do.

    That API makes its events of those of a chat. vLLM itself reads an error among them as a part of the
    answer, and sends what pydantic says of it. Without its status it is taken for an error of the replica.
    """
    convert = messages.message_stream_converter

    async def sent(chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        error = ""

        async def answer() -> AsyncGenerator[str, None]:
            nonlocal error
            async for chunk in chunks:
                if chunk.startswith(CHAT_ERROR):
                    error = chunk
                    return
                yield chunk

        async with aclosing(chunks), aclosing(convert(answer())) as events:
            async for event in events:
                yield event
        if error:
            # The same object, of Anthropic's type.
            yield f'event: error\ndata: {{"type": "error", {error.removeprefix("data: {")}'

    messages.message_stream_converter = sent


def name_prompts(llm: CheckedLLM, events: KvEvents) -> None:
    """Have each request name its prompt's prefixes as soon as vLLM knows its tokens."""
    assign = llm.input_processor.assign_request_id

    def assigned(request: Any) -> None:
        events.name(request)
        assign(request)

    llm.input_processor.assign_request_id = assigned


def check(params: Any, *, adapters: bool) -> None:
    """Raise :class:`VLLMValidationError` for parameters that end an engine, or hold up its other requests."""
    if adapters and params.prompt_logprobs is not None:
        # vLLM applies adapters to the logits of prompt tokens by its mapping of the sampled tokens, whose
        # number is another: on a CPU the einsum raises, on a GPU the kernel writes past its buffer.
        # With `logprob_token_ids` the completions API leaves `logprobs` out, and needs those of the prompt.
        if params.logprobs is not None or params.logprob_token_ids or params.prompt_logprobs > 0:
            raise VLLMValidationError(
                "log probabilities of a prompt (`prompt_logprobs`, or `echo` with `logprobs`) are not "
                "available on a model with adapters",
                parameter="echo",
            )
        # A chat's `echo` alone implies 0 of them, which nobody asked for.
        params.prompt_logprobs = None
        params.skip_reading_prefix_cache = False
    if params.structured_outputs is not None and (found := excess(params.structured_outputs)):
        raise VLLMValidationError(found, parameter="structured_outputs")


class VLLMEngine:
    """The engine port over one ``AsyncLLM``."""

    def __init__(
        self, llm: AsyncLLM, app: Any, steps: StepLogger, managed: bool, events: KvEvents | None = None
    ) -> None:
        self.app: ASGIApp = app
        self.events = events
        self.blocks: KvBlockIndex | None = None if events is None else events.index
        self.max_model_len: int | None = llm.model_config.max_model_len
        self._llm = llm
        self._steps = steps
        self._models = app.state.openai_serving_models
        # Adapters named in the engine arguments are always loaded, in addition to the slots.
        self._static = frozenset(self._models.lora_requests)
        lora = llm.vllm_config.lora_config if managed else None
        # Beyond either limit vLLM evicts by itself.
        slots = 0 if lora is None else min(lora.max_loras, lora.max_cpu_loras) - len(self._static)
        self.adapter_slots = slots

    def stats(self) -> EngineStats:
        latest = self._steps.latest
        # A core that hangs while idle does not report new requests, but its front end counts them.
        unseen = self._llm.get_num_unfinished_requests() - latest.running
        return msgspec.structs.replace(
            latest,
            waiting=max(latest.waiting, unseen, 0),
            prefilling=self._llm.output_processor.get_num_queued_tokens(),
        )

    def take_steps(self) -> tuple[StepSample, ...]:
        return self._steps.took.take()

    def timing(self) -> Timing:
        scheduler, cache = self._llm.vllm_config.scheduler_config, self._llm.vllm_config.cache_config
        return Timing(
            limits=BatchLimits(
                max_num_batched_tokens=scheduler.max_num_batched_tokens,
                max_num_seqs=scheduler.max_num_seqs,
                kv_tokens=cache.kv_cache_size_tokens or 0,
            )
        )

    def adapters(self) -> tuple[str, ...]:
        return tuple(self._models.lora_requests)

    async def load(self, name: str, path: Path) -> None:
        # Ids are never reused, so that no request can get another adapter.
        request = self._models.lora_requests.get(name) or LoRARequest(
            lora_name=name, lora_int_id=self._models.lora_id_counter.inc(1), lora_path=str(path)
        )
        # A load takes place between two steps and is part of neither.
        self._steps.took.broken()
        try:
            if not await self._llm.add_lora(request):
                raise ValueError("not every worker has loaded it")
        except EngineDeadError as error:
            raise EngineFailed(f"vLLM's engine died: {error}") from error
        except Exception as error:
            # Some of its workers may have loaded it.
            await self._remove(request.lora_int_id)
            raise AdapterRefused("engine_refused", f"vLLM: {error}"[:500]) from error
        finally:
            self._steps.took.broken()
        # From now on vLLM's app resolves the name.
        self._models.lora_requests[name] = request

    async def unload(self, name: str) -> None:
        if name in self._static or (request := self._models.lora_requests.pop(name, None)) is None:
            return
        # vLLM would reload it from its files, within a step, for a request that still runs: a request whose
        # client disconnected may be aborted later than its answer ends.
        states = self._llm.output_processor.request_states
        while any(state.lora_name == name for state in states.values()):  # noqa: ASYNC110 - vLLM has no event
            await asyncio.sleep(LEAVING_S)
        await self._remove(request.lora_int_id)

    async def loaded(self) -> frozenset[str]:
        if not self.adapter_slots:
            return frozenset()
        try:
            there = await self._llm.list_loras()
        except EngineDeadError as error:
            raise EngineFailed(f"vLLM's engine died: {error}") from error
        names = {request.lora_int_id: name for name, request in self._models.lora_requests.items()}
        for stray in there - names.keys():
            await self._remove(stray)
        return frozenset(names[known] for known in there & names.keys()) - self._static

    async def _remove(self, adapter_id: int) -> None:
        try:
            await self._llm.remove_lora(adapter_id)
        except EngineDeadError as error:
            raise EngineFailed(f"vLLM's engine died: {error}") from error

    async def sleep(self) -> None:
        # Level 1: weights move to host memory, the KV cache is dropped. By default vLLM aborts requests.
        try:
            await self._llm.sleep(level=1, mode="wait")
        except Exception as error:
            raise EngineFailed(f"vLLM did not fall asleep: {error}") from error
        if self.blocks is not None:
            self.blocks.cleared()

    async def wake(self) -> None:
        try:
            awake = await self._llm.wake_up()
        except Exception as error:
            raise EngineFailed(f"vLLM did not wake: {error}") from error
        if not awake:
            raise EngineFailed("vLLM did not wake: a part of its memory stays away")

    async def profile(self, seconds: float) -> Path:
        return await vllm_torch_trace.record(self._llm, seconds)

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored)

    async def check(self) -> None:
        if self._llm.errored:
            raise EngineFailed(f"vLLM's engine core is dead: {self._llm.dead_error}")
        if self.events is not None:
            self.events.check()
        await self._llm.check_health()

    async def close(self) -> None:
        if self.events is not None:
            self.events.close()
        self._llm.shutdown()


async def create(spec: EngineSpec) -> VLLMEngine:
    """Build the engine and its app; takes as long as vLLM needs to load the weights."""
    cli_env_setup()
    args = arguments(spec)
    config = configuration(spec, args)
    vllm_torch_trace.prepare(config)
    loggers: list[StepLogger] = []

    def stat_logger(vllm_config: Any, engine_index: int) -> StepLogger:
        loggers.append(StepLogger(vllm_config, engine_index))
        return loggers[-1]

    with starting(spec, config):
        llm = CheckedLLM.from_vllm_config(
            config,
            usage_context=USAGE,
            stat_loggers=[stat_logger, StepMetrics],
            aggregate_engine_logging=args.aggregate_engine_logging,
            disable_log_stats=args.disable_log_stats,
        )
    steps = None
    if type(llm.engine_core) is AsyncMPClient:  # clients of several engine cores do more with what they read
        steps = exchange_directly(llm.engine_core)
        loggers[0].clock = steps.step_ended_at
    # The media with which vLLM warmed up.
    await llm.reset_mm_cache()
    tasks = await llm.get_supported_tasks()
    app = build_app(args, supported_tasks=tasks, model_config=llm.model_config)
    await init_app_state(llm, app.state, args, tasks)
    if (responses := getattr(app.state, "openai_serving_responses", None)) is not None:
        refuse_early(responses, llm)
        send_stream_errors(responses)
    if (messages := getattr(app.state, "anthropic_serving_messages", None)) is not None:
        send_message_errors(messages)
    # vLLM's error handler stops the server when the engine dies; this server ends by itself.
    app.state.server = types.SimpleNamespace()
    events = followed(llm)
    if events is not None:
        name_prompts(llm, events)
    engine = VLLMEngine(llm, app, loggers[0], spec.adapter_slots > 0, events)
    engine.app = fast_path(llm, app, steps)
    return engine
