"""`vllm serve`'s flags as a deployment file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from store.key_derivation import digest_of
from tidegate.importers.vllm_flags import MachineResources, read_flags, translate

GPUS = MachineResources(gpus=8, cpus=64, bfloat16=True)
CPUS = MachineResources(gpus=0, cpus=2)
MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def document(*words: str, machine: MachineResources = GPUS, **environment: str) -> dict[str, Any]:
    found = translate([MODEL, *words], environment, machine).document
    parse(found)
    return found


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--max-model-len 8k", {"max_model_len": 8000}),
        ("--max-model-len=1K", {"max_model_len": 1024}),
        ("--gpu-memory-utilization 0.85 --dtype auto", {"gpu_memory_utilization": 0.85, "dtype": "auto"}),
        ("--gpu_memory_utilization .9", {"gpu_memory_utilization": ".9"}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enforce-eager --seed -1", {"enforce_eager": True, "seed": -1}),
        ("-tp 2 -O3", {"tensor_parallel_size": 2, "optimization_level": 3}),
        ('--hf-overrides {"a":[1]}', {"hf_overrides": {"a": [1]}}),
        (
            "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        ),
        ("--served-model-name a b --port 1", {"served_model_name": ["a", "b"], "port": 1}),
    ],
)
def test_flags_are_read_as_vllm_reads_them(words: str, given: dict[str, Any]) -> None:
    assert read_flags(words.split()) == given


def test_a_deployment_on_gpus() -> None:
    found = document(
        "-tp", "2", "--served-model-name", "llama", "--max-num-seqs", "64", VLLM_LOGGING_LEVEL="INFO"
    )
    (model,) = found["models"]
    assert (model["name"], model["source"], model["engine_args"]) == ("llama", MODEL, {"max_num_seqs": 64})
    assert model["shapes"] == {"replica": {"gpus": 2, "tensor_parallel": 2}}
    assert model["modes"]["multi-replica"]["replicas"] == {"min": 1, "max": 4}
    assert model["env"] == {"VLLM_LOGGING_LEVEL": "INFO"}
    assert found["gateway"] == {"host": "127.0.0.1", "port": 8000, "admin_port": 8001}
    assert found["budget"] == {"gpus": 8}


def test_data_parallel_ranks_are_replicas() -> None:
    (model,) = document("-dp", "3", "-tp", "2")["models"]
    assert model["modes"]["multi-replica"]["replicas"] == 3
    assert model["control"]["policy"] == "static"


def test_a_deployment_on_a_cpu_without_bfloat16() -> None:
    (model,) = document(machine=CPUS)["models"]
    assert model["shapes"] == {"replica": {"cpus": 2}}
    assert model["engine_args"] == {"enforce_eager": True, "dtype": "float32"}


def test_keys_become_digests() -> None:
    for found in (document("--api-key", "sk-1"), document(VLLM_API_KEY="sk-1")):
        assert found["tenants"] == [{"name": "default", "keys_sha256": [digest_of(b"sk-1")]}]
        assert "sk-1" not in str(found)


def test_static_adapters_are_declared(tmp_path: Path) -> None:
    words = ("--lora-modules", "a=org/a", f'{{"name":"b","path":"{tmp_path}"}}', "--max-lora-rank", "64")
    (model,) = document("--enable-lora", *words)["models"]
    assert model["adapters"] == {
        "max_rank": 64,
        "sources": [{"name": "a", "source": "hf:org/a"}, {"name": "b", "path": str(tmp_path)}],
    }


def test_the_flags_of_a_file_give_way_to_those_given(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("max-model-len: 100\nport: 9000\n")
    found = document("--config", str(file), "--port", "9001")
    assert found["models"][0]["engine_args"] == {"max_model_len": 100}
    assert found["gateway"]["port"] == 9001


@pytest.mark.parametrize(
    ("words", "path", "expected"),
    [
        (["--max-modle-len", "1"], "--max-modle-len", "did you mean 'max_model_len'"),
        (["-tp", "16"], "--tensor-parallel-size", "at most 8"),
        (["-tp", "two"], "--tensor-parallel-size", "a whole number"),
        (["-dp", "9"], "--data-parallel-size", "1 to 8"),
        (["-pp", "2"], "--pipeline-parallel-size", "1: a replica is one engine"),
        (["--uds", "/x"], "--uds", "Tidegate does not set itself"),
        (["--served-model-name", "a", "b"], "--served-model-name", "one name"),
        (["--lora-modules", "a"], "--lora-modules", "NAME=PATH"),
        (["--hf-overrides", "{"], "--hf-overrides", "JSON"),
        (["--config", "absent.yaml"], "--config", "a YAML file"),
        (["word"], "vLLM's flags", "a flag"),
    ],
)
def test_what_cannot_be_carried_out_is_refused(words: list[str], path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate([MODEL, *words], {}, GPUS)
    assert caught.value.path == path
    assert expected in caught.value.expected
