"""The configuration of Tidegate's engine beside that of `vllm serve`, on a platform that is only pretended.

Run as ``python -m tests.serve.engine.engine_defaults KIND NAME BYTES MAJOR ENGINE_ARGS FOLDER``; the last
line of its output is JSON.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policy.types import EngineKind, Runner
from serve.engine.interface import EngineSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2,
    "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


def pretend(kind: str, name: str, memory: int, major: int) -> None:
    """Have vLLM believe in a card ``name`` of ``memory`` bytes; nothing is initialised. ``cpu`` is real."""
    if kind == "cpu":
        return
    # vLLM's build for CPUs has no kernels of GPUs.
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    if kind == "rocm":
        card = types.SimpleNamespace(gcnArchName="gfx942", multi_processor_count=304)
        importlib.import_module("torch").cuda.get_device_properties = lambda device=None: card
    platforms: Any = importlib.import_module("vllm.platforms")
    module = importlib.import_module(f"vllm.platforms.{kind}")
    base = module.NonNvmlCudaPlatform if kind == "cuda" else module.RocmPlatform
    capability = module.DeviceCapability(major=major, minor=0)
    fake = {
        "get_device_name": lambda device_id=0: name,
        "get_device_total_memory": lambda device_id=0: memory,
        "get_device_capability": lambda device_id=0: capability,
        "device_count": lambda: 8,
    }
    platforms._current_platform = type("Pretended", (base,), {k: staticmethod(v) for k, v in fake.items()})()


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The fields of nested configurations by path, as text."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, enum.Enum) or type(value).__repr__ is not object.__repr__:
        yield path, repr(value)


def compare(given: dict[str, Any], folder: Path, cpus: int) -> dict[str, Any]:
    """What differs on the engine arguments ``given``; the names that Tidegate sets, and the batch limits."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

    from serve.engine.vllm_arguments import DEFAULTS, arguments, configuration, own_arguments  # noqa: PLC0415
    from serve.engine.vllm_kv_events import event_arguments  # noqa: PLC0415

    (folder / "config.json").write_text(json.dumps(LLAMA))
    given = {"skip_tokenizer_init": True, **given}
    spec = EngineSpec(
        kind=EngineKind.VLLM, model="m", runner=Runner.GENERATE, host="127.0.0.1", secret="x", bound=8,
        weights=str(folder), engine_args=given, cpus=cpus,
    )  # fmt: skip
    ours, served = arguments(spec), parsed_by_vllm(folder, given)
    engine = AsyncEngineArgs.from_cli_args(served).create_engine_config(UsageContext.OPENAI_API_SERVER)
    left = dict(leaves({"arguments": vars(ours), "engine": configuration(spec, ours)}))
    right = dict(leaves({"arguments": vars(served), "engine": engine}))
    scheduler = engine.scheduler_config
    return {
        "different": [path for path in left.keys() | right.keys() if left.get(path) != right.get(path)],
        "compared": len(left),
        "set": [*own_arguments(spec), *event_arguments(spec), *DEFAULTS],
        "limits": [scheduler.max_num_batched_tokens, scheduler.max_num_seqs],
    }


def parsed_by_vllm(model: Path, given: dict[str, Any]) -> Any:
    """What `vllm serve MODEL` parses of the engine arguments, as a user types them."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    words = ["--model", str(model)]
    for key, value in given.items():
        words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    return make_arg_parser(FlexibleArgumentParser()).parse_args(words)


if __name__ == "__main__":
    _, kind, name, memory, major, given, folder = sys.argv
    pretend(kind, name, int(memory), int(major))
    found = compare(json.loads(given), Path(folder), int(kind == "cpu"))
    sys.stdout.write("\n" + json.dumps(found))
