"""What a deployment's engine arguments become in vLLM, by vLLM's own parser."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml

from policy.errors import EngineFailed
from policy.types import EngineKind, Runner
from serve.engine.port import EngineSpec
from tests.e2e.stack import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def spec(engine_args: dict[str, Any], runner: Runner = Runner.GENERATE) -> EngineSpec:
    return EngineSpec(
        kind=EngineKind.VLLM, replica="r", model="m", runner=runner, shape="s", generation=1,
        host="127.0.0.1", secret="x", bound=8, weights="/weights", tensor_parallel=2, engine_args=engine_args,
    )  # fmt: skip


def test_what_ships_is_what_vllm_understands() -> None:
    from serve.engine.vllm import arguments  # noqa: PLC0415 - vLLM takes seconds to import

    for path in sorted((ROOT / "deployments").glob("*.yaml")):
        for model in yaml.safe_load(path.read_text())["models"]:
            if model.get("engine", "vllm") == "vllm":
                for shape in model["shapes"].values():
                    arguments(spec({**model.get("engine_args", {}), **shape.get("engine_args", {})}))


def test_our_own_arguments_win_and_nested_ones_become_objects() -> None:
    from serve.engine.vllm import arguments  # noqa: PLC0415

    given = {"max_model_len": 512, "enforce_eager": True, "generation_config": None, "hf_overrides": {"a": 1}}
    args = arguments(spec(given, Runner.POOLING))
    assert (args.model, args.served_model_name, args.tensor_parallel_size) == ("/weights", ["m"], 2)
    assert (args.runner, args.max_model_len, args.enforce_eager) == ("pooling", 512, True)
    assert args.hf_overrides == {"a": 1}
    assert args.enable_log_requests is False


def test_adapters_have_as_many_slots_as_are_kept_in_memory() -> None:
    from serve.engine.vllm import arguments  # noqa: PLC0415

    told = msgspec.structs.replace(
        spec({"lora_modules": ["sql=/adapters/sql"]}), adapter_slots=4, max_rank=12
    )
    args = arguments(told)
    # What is named in the arguments is always there, beside the slots.
    assert (args.enable_lora, args.max_loras, args.max_cpu_loras) == (True, 5, None)
    # The next larger rank of those that vLLM has kernels for.
    assert args.max_lora_rank == 16
    assert arguments(spec({})).enable_lora is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"no_such_argument": 1}, "no-such-argument"),
        ({"max_num_seqs": "many"}, "max-num-seqs"),
        ({"dtype": "float3"}, "dtype"),
    ],
)
def test_a_wrong_argument_is_refused_in_vllms_words(given: dict[str, Any], said: str) -> None:
    from serve.engine.vllm import arguments  # noqa: PLC0415

    with pytest.raises(EngineFailed, match=said):
        arguments(spec(given))


def test_each_step_adds_up() -> None:
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats  # noqa: PLC0415

    from serve.engine.vllm import StepLogger  # noqa: PLC0415

    log = StepLogger(None)
    iteration = IterationStats()
    iteration.num_generation_tokens = 3
    log.record(SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.5), iteration)
    log.record(None, iteration)
    stats = log.latest
    assert (stats.running, stats.waiting, stats.kv_used) == (2, 1, 0.5)
    assert (stats.tokens, stats.steps) == (6, 2)
