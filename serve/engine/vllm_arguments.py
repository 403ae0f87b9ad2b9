"""vLLM's arguments: those of the deployment file, those that Tidegate sets, and the configuration of them.

Everything else is as `vllm serve` has it (``entrypoints/cli/serve.py`` and
``entrypoints/launchers/api_server/entry.py``, 0.32).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import msgspec
from vllm.config.lora import MaxLoRARanks
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import (
    make_arg_parser,
    propagate_flash_late_interaction,
    validate_parsed_serve_args,
)
from vllm.entrypoints.launchers.launcher import validate_api_server_args
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from policy.errors import EngineFailed
from serve.engine.interface import EngineSpec
from serve.engine.vllm_kv_events import event_arguments

# Among others vLLM's defaults for the size of a batch depend on it.
USAGE = UsageContext.OPENAI_API_SERVER

DEFAULTS: dict[str, Any] = {
    # vLLM would fetch the media of a request from any URL, also from addresses that only it reaches.
    "allowed_media_domains": ["engine-args-allowed-media-domains-is-not-set.invalid"],
    # An engine would compile all grammars with the library that suits the first request with one. Where that
    # was `guidance`, which takes schemas that `xgrammar` does not, every later call of a tool failed.
    "structured_outputs_config": {"backend": "xgrammar"},
}

# Of an engine's fraction of a GPU; the rest is for what vLLM does not count, such as its CUDA context.
MEMORY_OF_SHARE = 0.9


def own_arguments(spec: EngineSpec) -> dict[str, Any]:
    """The arguments that Tidegate sets; all others are those of the deployment file, or vLLM's defaults."""
    owned = {
        "model": spec.weights,
        "served_model_name": spec.model,
        "tensor_parallel_size": spec.tensor_parallel,
        "runner": str(spec.runner),
        # Routers learn from the cached tokens of each prompt.
        "enable_prompt_tokens_details": True,
        # Prompts are private and must not be logged; the gateway counts requests.
        "enable_log_requests": False,
        # Needed for the tokens scheduled in each step.
        "enable_logging_iteration_details": True,
        "disable_uvicorn_access_log": True,
    }
    if spec.sleeps:
        owned["enable_sleep_mode"] = True
    if spec.adapter_slots:
        # With as many adapters in host memory as slots vLLM never evicts one. It would reload an evicted
        # one from its files, within a step, and fail if they are gone.
        static = spec.engine_args.get("lora_modules") or []
        owned |= {
            "enable_lora": True,
            "max_loras": spec.adapter_slots + len(static if isinstance(static, list) else [static]),
            "max_lora_rank": min(rank for rank in get_args(MaxLoRARanks) if rank >= spec.max_rank),
        }
    return owned


def arguments(spec: EngineSpec) -> Any:
    """vLLM's parsed arguments for ``spec``; raises :class:`EngineFailed` with vLLM's message.

    The arguments pass through vLLM's own command-line parser, so the same values are refused, and nested
    configurations become the objects that it expects. Plugins with parsers are imported.
    """
    parser = make_arg_parser(FlexibleArgumentParser())

    def refuse(message: str) -> None:
        raise EngineFailed(f"engine_args: {message}")

    parser.error = refuse
    shared = {"gpu_memory_utilization": MEMORY_OF_SHARE * spec.share} if spec.share < 1 else {}
    given = {**DEFAULTS, **event_arguments(spec), **shared, **spec.engine_args, **own_arguments(spec)}
    for name, default in DEFAULTS.items():
        if isinstance(default, dict) and isinstance(given[name], dict):
            given[name] = default | given[name]
    args = parser.parse_args([word for item in given.items() for word in _flag(*item)])
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    try:
        validate_parsed_serve_args(args)
        validate_api_server_args(args)
    except (KeyError, TypeError, ValueError) as error:
        refuse(str(error.args[0]))
    return args


def configuration(spec: EngineSpec, args: Any) -> Any:
    """The engine's configuration, as vLLM's own server makes it of the parsed ``args``."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    propagate_flash_late_interaction(args, engine_args)
    if spec.cpus:
        # A build for GPUs may lack what these derive from.
        from serve.engine.vllm_cpu import CoreExecutor, PatchedCPUWorker, SleepingExecutor  # noqa: PLC0415

        if engine_args.distributed_executor_backend is None:
            workers = engine_args.tensor_parallel_size * engine_args.pipeline_parallel_size
            workers *= engine_args.data_parallel_size
            engine_args.distributed_executor_backend = CoreExecutor if workers == 1 else SleepingExecutor
        if engine_args.worker_cls == "auto":
            engine_args.worker_cls = f"{PatchedCPUWorker.__module__}.{PatchedCPUWorker.__qualname__}"
    return engine_args.create_engine_config(usage_context=USAGE)


def starting(spec: EngineSpec, config: Any) -> AbstractContextManager[None]:
    """The environment in which vLLM's processes start with ``config``."""
    if not spec.cpus:
        return nullcontext()
    from serve.engine.vllm_cpu import bound  # noqa: PLC0415 - see `configuration`

    return bound(config)


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, dict):
        return [flag, msgspec.json.encode(value).decode()]
    if isinstance(value, list):
        return [flag, *(msgspec.json.encode(v).decode() if isinstance(v, dict) else str(v) for v in value)]
    return [flag, str(value)]
