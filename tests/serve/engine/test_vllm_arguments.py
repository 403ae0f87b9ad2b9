"""Engine arguments of a deployment, parsed by vLLM's own parser, and the engine over a fake vLLM."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml

from policy.config.deployment import ModelSpec, Shape
from policy.config.engine_arguments import KNOWN, VLLM
from policy.engine.builtin_profiles import shipped
from policy.errors import EngineFailed
from policy.types import EngineKind, Runner
from serve.engine.interface import EngineSpec
from serve.host.version_check import installed
from tests.e2e.stack import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def spec(engine_args: dict[str, Any], runner: Runner = Runner.GENERATE) -> EngineSpec:
    return EngineSpec(
        kind=EngineKind.VLLM, model="m", runner=runner, host="127.0.0.1",
        secret="x", bound=8, weights="/weights", tensor_parallel=2, engine_args=engine_args,
    )  # fmt: skip


def parsed(given: dict[str, Any], runner: Runner = Runner.GENERATE, **changes: Any) -> Any:
    from serve.engine.vllm_arguments import arguments  # noqa: PLC0415 - vLLM takes seconds to import

    return arguments(msgspec.structs.replace(spec(given, runner), **changes))


def test_shipped_deployments_have_valid_engine_arguments() -> None:
    for path in sorted((ROOT / "deployments").glob("*.yaml")):
        for model in yaml.safe_load(path.read_text())["models"]:
            if model.get("engine", "vllm") == "vllm":
                for shape in model["shapes"].values():
                    parsed({**model.get("engine_args", {}), **shape.get("engine_args", {})})


@pytest.mark.long
@pytest.mark.parametrize(
    ("card", "given", "limits"),
    [
        (("cpu", "", 0, 0), {}, [2048, 128]),
        (("cuda", "NVIDIA H100 80GB HBM3", 79.6, 9), {}, [8192, 1024]),
        (("cuda", "NVIDIA A100-SXM4-80GB", 80, 8), {"performance_mode": "throughput"}, [4096, 512]),
        (("cuda", "NVIDIA B200", 178, 10), {"max_num_batched_tokens": 512}, [512, 512]),
        (("rocm", "AMD_Instinct_MI300X", 192, 9), {}, [16384, 1024]),
    ],
)
def test_engines_are_configured_as_by_vllm_serve(
    card: tuple[str, str, float, int], given: dict[str, Any], limits: list[int], tmp_path: Path
) -> None:
    kind, name, gib, major = card
    words = [kind, name, str(int(gib * 2**30)), str(major), json.dumps(given), str(tmp_path)]
    command = [sys.executable, "-m", "tests.serve.engine.engine_defaults", *words]
    output = subprocess.run(command, check=True, capture_output=True, timeout=300, cwd=ROOT).stdout
    found = json.loads(output.splitlines()[-1])
    own = {*found["set"], "instance_id"}
    if kind == "cpu":
        own |= {"distributed_executor_backend", "worker_cls"}
    assert [path for path in found["different"] if own.isdisjoint(path.split("."))] == []
    assert found["compared"] > 800
    assert found["limits"] == limits


@pytest.mark.parametrize(
    ("profiled", "name", "gib"),
    [
        ("h100-8b", "NVIDIA H100 80GB HBM3", 79.6),
        ("h200-70b", "NVIDIA H200", 140.4),
        ("a100-8b", "NVIDIA A100-SXM4-80GB", 80),
        ("l4-8b", "NVIDIA L4", 22.5),
        (None, "cpu", 0),
    ],
)
def test_profiles_have_the_batch_limits_of_the_engine(
    profiled: str | None, name: str, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine import arg_utils  # noqa: PLC0415

    from serve.engine.vllm_arguments import USAGE  # noqa: PLC0415

    platform = SimpleNamespace(
        get_device_total_memory=lambda: int(gib * 2**30),
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: name == "cpu",
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(world_size=1)
    shape = Shape(gpus=8, tensor_parallel=8) if profiled else Shape(cpus=8)
    shape = msgspec.structs.replace(shape, max_in_flight=4096)
    for model in (profiled, "cpu-smollm2-135m" if profiled is None else profiled):
        limits = shipped(ModelSpec(name="m", profile=model), shape).limits
        assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (tokens[USAGE], seqs[USAGE])


def test_the_known_arguments_are_those_of_the_installed_vllm() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    flags = [
        flag for each in make_arg_parser(FlexibleArgumentParser())._actions for flag in each.option_strings
    ]
    names = {flag[2:].replace("-", "_") for flag in flags if flag.startswith("--")}
    assert {name for name in names if not name.startswith("no_")} - {"help"} == KNOWN
    assert installed().vllm == VLLM


@pytest.mark.parametrize(
    ("package", "base", "argument"),
    [
        ("tool_parsers", "ToolParser", "tool_parser_plugin"),
        ("reasoning", "ReasoningParser", "reasoning_parser_plugin"),
    ],
)
def test_plugins_with_parsers_are_imported(package: str, base: str, argument: str, tmp_path: Path) -> None:
    manager = getattr(importlib.import_module(f"vllm.{package}"), f"{base}Manager")
    plugin = tmp_path / f"{package}_of_ours.py"
    plugin.write_text(
        f"from vllm.{package} import {base}, {base}Manager\n"
        f"@{base}Manager.register_module('ours')\nclass Ours({base}): ...\n"
    )
    assert "ours" not in manager.list_registered()
    parsed({argument: str(plugin)})
    assert "ours" in manager.list_registered()


def test_own_arguments_take_precedence_and_nested_ones_become_objects() -> None:
    given = {"max_model_len": 512, "enforce_eager": True, "generation_config": None, "hf_overrides": {"a": 1}}
    args = parsed(given, Runner.POOLING)
    assert (args.model, args.served_model_name, args.tensor_parallel_size) == ("/weights", ["m"], 2)
    assert (args.runner, args.max_model_len, args.enforce_eager) == ("pooling", 512, True)
    assert args.hf_overrides == {"a": 1}
    assert args.enable_log_requests is False


@pytest.mark.parametrize(
    ("given", "backend"), [({}, "xgrammar"), ({"backend": "guidance"}, "guidance"), (None, "xgrammar")]
)
def test_no_request_chooses_how_an_engine_compiles_grammars(
    given: dict[str, str] | None, backend: str
) -> None:
    args = parsed({} if given is None else {"structured_outputs_config": given})
    assert args.structured_outputs_config.backend == backend


def test_adapter_slots_become_max_loras() -> None:
    args = parsed({"lora_modules": ["sql=/adapters/sql"]}, adapter_slots=4, max_rank=12)
    # Adapters of the arguments are always loaded, in addition to the slots.
    assert (args.enable_lora, args.max_loras, args.max_cpu_loras) == (True, 5, None)
    # The next larger rank of those that vLLM has kernels for.
    assert args.max_lora_rank == 16


@pytest.mark.parametrize(("domains", "fetched"), [(None, False), (["media.example"], True)])
def test_media_of_a_request_is_fetched_from_listed_hosts_alone(
    domains: list[str] | None, fetched: bool
) -> None:
    from vllm.multimodal.media.connector import MediaConnector  # noqa: PLC0415

    allowed = parsed({"allowed_media_domains": domains} if domains else {}).allowed_media_domains
    asked: list[str] = []
    connection = SimpleNamespace(get_bytes=lambda url, **_: asked.append(url) or b"")
    connector = MediaConnector(connection=connection, allowed_media_domains=allowed)
    for url in ("http://169.254.169.254/", "https://media.example/a.png"):
        with pytest.raises(ValueError, match=r"allowed domains|identify"):
            connector.fetch_image(url)
    assert asked == (["https://media.example/a.png"] if fetched else [])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"no_such_argument": 1}, "no-such-argument"),
        ({"max_num_seqs": "many"}, "max-num-seqs"),
        ({"dtype": "float3"}, "dtype"),
        ({"enable_auto_tool_choice": True, "tool_call_parser": "lama"}, "invalid tool call parser: lama"),
        ({"enable_auto_tool_choice": True}, "requires --tool-call-parser"),
    ],
)
def test_an_invalid_argument_is_refused_with_vllms_message(given: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        parsed(given)


def test_the_step_logger_counts_and_times_steps() -> None:
    from vllm.v1.metrics.stats import (  # noqa: PLC0415
        IterationStats,
        SchedulerIterationDetails,
        SchedulerStats,
    )

    from serve.engine.vllm_stat_logger import StepLogger  # noqa: PLC0415

    now = 100.0
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=1000))
    log = StepLogger(config, clock=lambda: now)

    def step(prompts: int, decodes: int, kv_used: float, *, running: int, waiting: int = 0) -> None:
        details = SchedulerIterationDetails(
            iteration_index=0,
            num_ctx_requests=1 if prompts else 0,
            num_ctx_tokens=prompts,
            num_generation_requests=decodes,
            num_generation_tokens=decodes,
            elapsed_ms=1.0,
        )
        stats = SchedulerStats(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_skipped_waiting_reqs=1,
            kv_cache_usage=kv_used,
            iteration_details=details,
        )
        log.record(stats, iteration)
        # Or vLLM's own logger, which comes after ours, writes a line of each step.
        assert stats.iteration_details is None

    iteration = IterationStats()
    iteration.num_preempted_reqs = 1
    # A chunk of a prompt generates no token, but is counted.
    step(64, 0, 0.064, running=1)
    now += 0.5
    step(36, 0, 0.1, running=1, waiting=2)
    now += 0.1
    step(0, 1, 0.0, running=0)
    now += 60.0
    log.record(None, iteration)
    stats = log.latest
    assert (stats.running, stats.waiting, stats.kv_used, stats.deferred) == (0, 1, 0.0, 1)
    assert (stats.tokens, stats.steps, stats.preempted) == (101, 4, 4)
    assert [(each.tokens, each.kv_tokens, each.running, each.seconds) for each in log.took.take()] == [
        (1, 101, 1, 0.1),
        (36, 100, 1, 0.5),
    ]


@pytest.mark.parametrize(
    ("given", "changes", "name", "value"),
    [
        ({}, {}, "enable_lora", None),
        ({}, {}, "enable_sleep_mode", False),
        ({}, {"sleeps": True}, "enable_sleep_mode", True),
        ({"enable_logging_iteration_details": False}, {}, "enable_logging_iteration_details", True),
        # Less than its share of the memory of a GPU.
        ({}, {"share": 0.25}, "gpu_memory_utilization", 0.225),
        ({"gpu_memory_utilization": 0.2}, {"share": 0.25}, "gpu_memory_utilization", 0.2),
    ],
)
def test_an_argument_has_the_value_that_tidegate_needs(
    given: dict[str, Any], changes: dict[str, Any], name: str, value: object
) -> None:
    assert getattr(parsed(given, **changes), name) == (
        pytest.approx(value) if isinstance(value, float) else value
    )


async def test_an_engine_starts_as_that_of_vllms_own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve.engine import vllm as module  # noqa: PLC0415
    from serve.engine.vllm_arguments import USAGE  # noqa: PLC0415

    made: list[tuple[Any, Any]] = []
    awaited: list[str] = []
    loggers: list[Any] = []

    class Started(Llm):
        engine_core = SimpleNamespace()

        @classmethod
        def from_vllm_config(
            cls, config: Any, *, usage_context: Any, stat_loggers: list[Any], **_: Any
        ) -> Any:
            made.append((config, usage_context))
            loggers.append(stat_loggers[0](SimpleNamespace(), 0))
            return cls()

        async def reset_mm_cache(self) -> None:
            awaited.append("reset")

        async def get_supported_tasks(self) -> tuple[str, ...]:
            return ("generate",)

    async def init(llm: Any, state: Any, *_: Any) -> None:
        awaited.append("app")
        state.openai_serving_models = SimpleNamespace(lora_requests={})

    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    monkeypatch.setattr(module, "configuration", lambda spec, args: "configuration")
    monkeypatch.setattr(module, "CheckedLLM", Started)
    monkeypatch.setattr(module, "build_app", lambda *_, **__: SimpleNamespace(state=SimpleNamespace()))
    monkeypatch.setattr(module, "init_app_state", init)
    monkeypatch.setattr(module, "followed", lambda llm: None)
    monkeypatch.setattr(module, "fast_path", lambda llm, app, steps: app)
    monkeypatch.setattr(module, "AsyncMPClient", SimpleNamespace)
    reader = SimpleNamespace(step_ended_at=lambda: 7.0)
    monkeypatch.setattr(module, "exchange_directly", lambda core: reader)
    monkeypatch.setattr(module.vllm_torch_trace, "prepare", lambda config: None)
    await module.create(spec({}))
    assert loggers[0].clock() == 7.0, "steps are timed by the engine core"
    assert made == [("configuration", USAGE)]
    assert awaited == ["reset", "app"]
    assert os.environ.pop("VLLM_WORKER_MULTIPROC_METHOD") == "spawn"


class Llm:
    """The methods of ``AsyncLLM`` that sleep uses, with vLLM's own signatures."""

    def __init__(self, *, awake: bool = True) -> None:
        self.model_config = SimpleNamespace(enable_sleep_mode=True, max_model_len=512)
        self.vllm_config = SimpleNamespace(lora_config=None)
        self.awake = awake
        self.calls: list[Any] = []

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        self.calls.append(inspect.signature(AsyncLLM.sleep).bind(self, *args, **kwargs).arguments)

    async def wake_up(self, *args: Any, **kwargs: Any) -> bool:
        from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

        self.calls.append(inspect.signature(AsyncLLM.wake_up).bind(self, *args, **kwargs).arguments)
        return self.awake


async def test_sleep_keeps_weights_in_memory_and_running_requests() -> None:
    from serve.engine.vllm import VLLMEngine  # noqa: PLC0415
    from serve.engine.vllm_stat_logger import StepLogger  # noqa: PLC0415

    app: Any = SimpleNamespace(state=SimpleNamespace(openai_serving_models=SimpleNamespace(lora_requests={})))
    llm: Any = Llm()
    engine = VLLMEngine(llm, app, StepLogger(llm.vllm_config), managed=False)
    await engine.sleep()
    await engine.wake()
    assert [{key: call[key] for key in call if key != "self"} for call in llm.calls] == [
        {"level": 1, "mode": "wait"},
        {},
    ]
    llm.awake = False
    with pytest.raises(EngineFailed, match="did not wake"):
        await engine.wake()


def test_threads_beside_the_computing_one_run_on_every_core_of_the_parent() -> None:
    code = """
import os, threading, time
from serve.engine.vllm_cpu import release_threads
all_cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(all_cores)})
thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
thread.start()
assert os.sched_getaffinity(thread.native_id) == {min(all_cores)}
release_threads()
assert os.sched_getaffinity(thread.native_id) == all_cores == os.sched_getaffinity(os.getppid())
assert os.sched_getaffinity(0) == {min(all_cores)}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, cwd=ROOT)


@pytest.mark.parametrize(("workers", "executor"), [(1, "CoreExecutor"), (2, "SleepingExecutor")])
def test_the_only_worker_computes_in_the_engine_core(
    workers: int, executor: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from serve.engine import vllm_cpu  # noqa: PLC0415
    from serve.engine.vllm_arguments import arguments, configuration, starting  # noqa: PLC0415
    from tests.serve.engine.engine_defaults import LLAMA  # noqa: PLC0415

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join("0" * workers))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    own = msgspec.structs.replace(
        spec({"enforce_eager": True}), cpus=1, tensor_parallel=workers, weights=str(tmp_path)
    )
    config = configuration(own, arguments(own))
    assert config.parallel_config.distributed_executor_backend is getattr(vllm_cpu, executor)
    with starting(own, config):
        assert os.environ.get("OMP_NUM_THREADS") == ("1" if workers == 1 else None)
    assert "OMP_NUM_THREADS" not in os.environ


def test_the_engine_core_on_cpus_sleeps_until_its_worker_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition  # noqa: PLC0415

    from serve.engine.vllm_cpu import LOOK_MS, MultiprocExecutor, SleepingExecutor  # noqa: PLC0415

    waits: list[int | None] = []
    conditions: list[Any] = [SpinCondition.__new__(SpinCondition) for _ in range(2)]
    monkeypatch.setattr(SpinCondition, "wait", lambda self, timeout_ms=None: waits.append(timeout_ms))

    def made(self: Any) -> None:
        self.response_mqs = [SimpleNamespace(_spin_condition=condition) for condition in conditions]

    monkeypatch.setattr(MultiprocExecutor, "_init_executor", made)
    executor = SleepingExecutor.__new__(SleepingExecutor)
    executor._init_executor()
    for condition in conditions:
        assert condition.busy_loop_s == 0.0
        condition.wait(timeout_ms=5000)
        condition.wait(timeout_ms=1)
    assert waits == [LOOK_MS, 1] * 2
    # The attribute that is set exists in vLLM.
    assert "busy_loop_s" in inspect.signature(SpinCondition.__init__).parameters
    del executor.response_mqs


@pytest.mark.parametrize(
    ("path", "asked", "adapters", "param"),
    [
        ("completion", {"echo": True, "logprobs": 0}, True, "echo"),
        ("completion", {"echo": True, "logprobs": 0}, False, None),
        ("completion", {"echo": True}, True, None),
        ("completion", {"logprobs": 5}, True, None),
        ("chat_completion", {"echo": True, "logprobs": True}, True, "echo"),
        ("chat_completion", {"echo": True, "logprobs": True}, False, None),
        ("chat_completion", {"echo": True}, True, None),
        ("completion", {"echo": True, "logprobs": 0, "logprob_token_ids": [5]}, True, "echo"),
        ("completion", {"echo": True, "logprobs": 0, "logprob_token_ids": [5]}, False, None),
        ("completion", {"logprobs": 0, "logprob_token_ids": [5]}, True, None),
        ("completion", {"prompt_logprobs": 1}, True, "echo"),
        ("completion", {"structured_outputs": {"regex": "a" * 5000}}, False, "structured_outputs"),
    ],
)
def test_parameters_that_end_an_engine_are_refused(
    path: str, asked: dict[str, Any], adapters: bool, param: str | None
) -> None:
    from vllm.exceptions import VLLMValidationError  # noqa: PLC0415

    from serve.engine.vllm import check  # noqa: PLC0415

    protocol = importlib.import_module(f"vllm.entrypoints.openai.{path}.protocol")
    if path == "completion":
        request = protocol.CompletionRequest(model="m", prompt="hi", **asked)
    else:
        request = protocol.ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "hi"}], **asked
        )
    params = request.to_sampling_params(8, {})
    if param is not None:
        with pytest.raises(VLLMValidationError) as refused:
            check(params, adapters=adapters)
        assert refused.value.parameter == param
        return
    check(params, adapters=adapters)
    # The engine computes them unless nobody asked for them.
    assert not adapters or params.prompt_logprobs is None


async def test_parameters_are_refused_before_a_stream_is_open() -> None:
    from vllm.config import StructuredOutputsConfig  # noqa: PLC0415
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses  # noqa: PLC0415
    from vllm.exceptions import VLLMValidationError  # noqa: PLC0415
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams  # noqa: PLC0415

    from serve.engine.vllm import CheckedLLM, refuse_early  # noqa: PLC0415

    class Responses:
        async def _generate_with_builtin_tools(self, *, sampling_params: Any, **others: Any) -> Any:
            yield sampling_params, others

    llm = CheckedLLM.__new__(CheckedLLM)
    model = SimpleNamespace(max_logprobs=20, is_diffusion=False, get_vocab_size=lambda: 100)
    llm.vllm_config = SimpleNamespace(
        lora_config=None,
        model_config=model,
        speculative_config=None,
        structured_outputs_config=StructuredOutputsConfig(),
    )
    llm.input_processor = SimpleNamespace(tokenizer=object())
    responses: Any = Responses()
    refuse_early(responses, llm)
    for params in (
        SamplingParams(stop_token_ids=[100]),
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "x"})),
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a" * 5000)),
    ):
        with pytest.raises(VLLMValidationError):
            llm.generate("hi", params, "1")
        with pytest.raises(VLLMValidationError):
            responses._generate_with_builtin_tools(request_id="1", sampling_params=params)
    params = SamplingParams()
    passed = responses._generate_with_builtin_tools(request_id="1", sampling_params=params)
    assert [each async for each in passed] == [(params, {"request_id": "1"})]
    # vLLM has the method, and calls it with names.
    assert (
        "sampling_params" in inspect.signature(OpenAIServingResponses._generate_with_builtin_tools).parameters
    )


async def test_an_error_in_a_stream_of_the_responses_api_is_sent() -> None:
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses  # noqa: PLC0415

    from serve.engine.vllm import NoAllowedToken, send_stream_errors  # noqa: PLC0415

    class Responses:
        def _convert_generation_error_to_streaming_response(self, error: Exception) -> str:
            raise NotImplementedError

        async def responses_stream_generator(self, *events: Any) -> AsyncGenerator[Any, None]:
            try:
                for event in events:
                    yield event
                raise NoAllowedToken
            except NoAllowedToken as error:
                yield self._convert_generation_error_to_streaming_response(error)

    # vLLM has both methods.
    assert all(hasattr(OpenAIServingResponses, name) for name in vars(Responses) if not name.startswith("__"))
    responses: Any = Responses()
    send_stream_errors(responses)
    created, error = [each async for each in responses.responses_stream_generator("created")]
    assert created == "created"
    assert error.error.code == 400


@pytest.mark.parametrize("first", [True, False])
async def test_an_error_in_a_stream_of_the_messages_api_keeps_its_status(first: bool) -> None:
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages  # noqa: PLC0415
    from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: PLC0415
        ChatCompletionStreamResponse,
    )

    from serve.engine.vllm import NoAllowedToken, send_message_errors  # noqa: PLC0415

    messages: Any = AnthropicServingMessages.__new__(AnthropicServingMessages)
    ended = False

    async def chunks() -> AsyncGenerator[str, None]:
        nonlocal ended
        try:
            if not first:
                yield f"data: {ChatCompletionStreamResponse(model='m', choices=[]).model_dump_json()}\n\n"
            yield f"data: {messages._convert_generation_error_to_streaming_response(NoAllowedToken())}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            ended = True

    send_message_errors(messages)
    events = [each async for each in messages.message_stream_converter(chunks())]
    names = [event.partition("\n")[0].removeprefix("event: ") for event in events]
    assert names == ["error"] if first else ["message_start", "error"]
    error = json.loads(events[-1].partition("data: ")[2])
    assert (error["type"], error["error"]["code"]) == ("error", 400)
    assert error["error"]["message"] == str(NoAllowedToken())
    assert ended


def failing(kv: Any = None) -> Any:
    from serve.engine.vllm import CheckedLLM  # noqa: PLC0415

    llm = CheckedLLM.__new__(CheckedLLM)
    llm.vllm_config = SimpleNamespace(kv_transfer_config=kv, ec_transfer_config=None)
    return llm


def output_of(reason: str | None, **stats: Any) -> Any:
    from vllm.v1.metrics.stats import RequestStateStats  # noqa: PLC0415

    output = SimpleNamespace(finish_reason=reason, token_ids=[])
    return SimpleNamespace(outputs=[output], metrics=RequestStateStats(**stats))


@pytest.mark.parametrize(
    ("policy", "stats", "status"),
    [
        ("fail", {"queued_ts": 1.0}, 503),
        ("recompute", {"queued_ts": 1.0}, 400),
        ("fail", {"queued_ts": 1.0, "scheduled_ts": 2.0}, None),
        ("fail", {}, None),
    ],
)
def test_a_failure_of_the_replica_is_not_the_grammars(
    policy: str, stats: dict[str, Any], status: int | None
) -> None:
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    llm = failing(KVTransferConfig(kv_load_failure_policy=policy))
    error = llm.refusal(SimpleNamespace(structured_outputs={}), output_of("error", **stats))
    assert (None if error is None else error.status_code) == status
    assert llm.refusal(SimpleNamespace(structured_outputs=None), output_of("error", **stats)) is None


async def test_a_grammar_without_a_next_token_is_the_requests_error() -> None:
    from vllm.entrypoints.serve.exception_handling.error_response import (  # noqa: PLC0415
        create_error_response,
    )

    from serve.engine.vllm import NoAllowedToken, constrained  # noqa: PLC0415

    ended = False

    async def outputs() -> AsyncGenerator[Any, None]:
        nonlocal ended
        try:
            for reason in (None, "error"):
                yield output_of(reason, queued_ts=1.0, scheduled_ts=2.0, num_generation_tokens=1)
        finally:
            ended = True

    served = constrained(failing(), outputs(), SimpleNamespace(structured_outputs={}))
    await anext(served)
    with pytest.raises(NoAllowedToken) as refused:
        await anext(served)
    assert ended
    assert create_error_response(refused.value).error.code == 400


def test_a_discarded_token_leaves_the_generator_of_its_request_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from serve.engine.vllm_cpu import CPUWorker, PatchedCPUWorker  # noqa: PLC0415

    generators = {0: "complete", 2: "partial"}
    worker = PatchedCPUWorker.__new__(PatchedCPUWorker)
    worker.model_runner = SimpleNamespace(
        input_batch=SimpleNamespace(generators=generators),
        discard_request_mask=SimpleNamespace(np=[False, True, True, True]),
    )
    monkeypatch.setattr(CPUWorker, "sample_tokens", lambda self, grammar: (grammar, dict(generators)))
    assert worker.sample_tokens("grammar") == ("grammar", {0: "complete"})
    assert generators == {0: "complete", 2: "partial"}


@pytest.mark.parametrize("no_lora", [True, False])
def test_a_step_without_an_adapter_does_without_their_arithmetic(
    monkeypatch: pytest.MonkeyPatch, *, no_lora: bool
) -> None:
    from serve.engine.vllm_cpu import CPUWorker, PatchedCPUWorker, PunicaWrapperCPU  # noqa: PLC0415

    added: list[str] = []
    for name in ("add_lora_logits", "add_lora_linear"):
        monkeypatch.setattr(PunicaWrapperCPU, name, lambda wrapper, what: added.append(what))
    monkeypatch.setattr(CPUWorker, "load_model", lambda self: None)
    PatchedCPUWorker.__new__(PatchedCPUWorker).load_model()
    wrapper = PunicaWrapperCPU.__new__(PunicaWrapperCPU)
    wrapper.no_lora = no_lora
    wrapper.add_lora_logits("logits")
    wrapper.add_lora_linear("linear")
    assert added == ([] if no_lora else ["logits", "linear"])
