"""Deployment files from LiteLLM's configuration and production-stack's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from policy.deployment_file.parse import parse
from policy.errors import ConfigError, PreconditionFailed
from store.key_derivation import digest_of
from store.state_dir import StateDir
from tidegate.cli import group
from tidegate.importers.litellm import from_litellm
from tidegate.importers.production_stack import from_production_stack
from tidegate.importers.write_document import write_document

LITELLM: dict[str, Any] = {
    "model_list": [
        {
            "model_name": "llama",
            "litellm_params": {
                "model": "hosted_vllm/meta-llama/Llama",
                "api_base": "http://10.0.0.1:8000/v1",
                "api_key": "os.environ/KEY",
                "rpm": 5,
            },
        },
        {
            "model_name": "llama",
            "litellm_params": {
                "model": "openai/llama",
                "api_base": "http://10.0.0.2/v1",
                "api_key": "sk-secret",
            },
            "model_info": {"input_cost_per_token": 5e-7, "output_cost_per_token": 1.5e-6},
        },
        {"model_name": "claude", "litellm_params": {"model": "anthropic/claude"}},
    ],
    "general_settings": {"master_key": "sk-1234"},
    "litellm_settings": {"fallbacks": [{"llama": ["claude"]}]},
}
STACK: dict[str, Any] = {
    "servingEngineSpec": {
        "vllmApiKey": "sk-1",
        "modelSpec": [
            {
                "name": "llama",
                "modelURL": "meta-llama/Llama",
                "replicaCount": 1,
                "requestGPU": 2,
                "vllmConfig": {
                    "tensorParallelSize": 2,
                    "maxModelLen": 4096,
                    "extraArgs": ["--disable-log-requests", "--gpu-memory-utilization", "0.8"],
                },
                "lmcacheConfig": {"enabled": True, "cpuOffloadingBufferSize": "30"},
                "hf_token": "secret",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {}}],
                "keda": {"enabled": True, "minReplicaCount": 1, "maxReplicaCount": 5},
            },
            {"name": "small", "modelURL": "org/small", "replicaCount": 2, "requestCPU": 4},
            {"name": "off", "modelURL": "org/off", "enabled": False},
        ],
    }
}


def test_litellm_servers_of_one_name_are_one_model() -> None:
    found = from_litellm(LITELLM)
    parse(found.document)
    (model,) = found.document["models"]
    assert model["urls"] == [
        {"url": "http://10.0.0.1:8000/v1", "model": "meta-llama/Llama", "key_env": "KEY"},
        {"url": "http://10.0.0.2/v1"},
    ]
    assert model["price"] == {"input": 0.5, "output": 1.5}
    assert found.document["tenants"][0]["keys_sha256"] == [digest_of(b"sk-1234")]
    assert "sk-" not in str(found.document)
    assert [note.split()[0] for note in found.notes] == [
        "model_list[0]:", "model_list[1].litellm_params.api_key", "model_list[2]", "fallbacks",
    ]  # fmt: skip


def test_production_stack_models() -> None:
    found = from_production_stack(STACK)
    parse(found.document)
    large, small = found.document["models"]
    assert large["engine_args"] == {
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.8,
        "kv_offloading_size": 30.0,
    }
    assert large["shapes"]["replica"] == {"gpus": 2, "tensor_parallel": 2}
    assert large["modes"]["multi-replica"]["replicas"] == {"min": 1, "max": 5}
    assert large["env"] == {"A": "1"}
    assert small["modes"]["multi-replica"]["replicas"] == 2
    assert small["shapes"]["replica"] == {"cpus": 4}
    assert found.document["budget"] == {"gpus": 10, "cpus": 8}
    assert "secret" not in str(found.document)


@pytest.mark.parametrize(
    ("read", "raw", "path"),
    [
        (from_litellm, {"model_list": [3]}, "model_list[0]"),
        (from_litellm, {"model_list": [LITELLM["model_list"][2]]}, "model_list"),
        (from_production_stack, {}, "servingEngineSpec"),
        (from_production_stack, {"servingEngineSpec": {"modelSpec": []}}, "servingEngineSpec.modelSpec"),
    ],
)
def test_values_of_another_kind_are_refused(read: Any, raw: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(raw)
    assert caught.value.path == path


def test_a_changed_file_is_not_replaced(tmp_path: Path) -> None:
    path, document = tmp_path / "x.yaml", from_production_stack(STACK).document
    write_document(path, document, "Head.", force=False)
    write_document(path, document, "Head.", force=False)
    path.write_text("mine")
    with pytest.raises(PreconditionFailed, match="--force"):
        write_document(path, document, "Head.", force=False)
    write_document(path, document, "Head.", force=True)
    assert yaml.safe_load(path.read_text()) == document


def test_the_commands_write_files_that_check_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(yaml.safe_dump(LITELLM))
    state = StateDir(tmp_path / "state")
    for words in (
        ["import", "litellm", "config.yaml", "--output", "a.yaml"],
        ["serve", "org/model", "--port", "9000", "--max-model-len", "2k", "--write-only"],
        ["check", "a.yaml"],
        ["check", "org-model.yaml"],
    ):
        result = CliRunner().invoke(group, ["--state-dir", str(state.root), *words])
        assert result.exit_code == 0, result.output
