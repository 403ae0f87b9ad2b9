"""The values of vLLM production-stack's Helm chart as a deployment file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from policy.config.convert import convert
from policy.config.deployment import FORBIDDEN_ENV
from policy.errors import ConfigError
from store.key_derivation import digest_of
from tidegate.importers.vllm_flags import ImportedDeployment, MachineResources, model_entry, read_flags

# The chart's router, where its clients expect it.
PORT = 30080
_FLAGS = {
    "enablePrefixCaching": "enable_prefix_caching",
    "enableChunkedPrefill": "enable_chunked_prefill",
    "maxModelLen": "max_model_len",
    "dtype": "dtype",
    "tensorParallelSize": "tensor_parallel_size",
    "maxNumSeqs": "max_num_seqs",
    "gpuMemoryUtilization": "gpu_memory_utilization",
    "maxLoras": "max_loras",
    "runner": "runner",
    "convert": "convert",
}
_Amount = int | float | str | None


class _Variable(msgspec.Struct):
    name: str
    value: Any = None


class _Offload(msgspec.Struct, rename="camel"):
    enabled: bool = False
    cpu_offloading_buffer_size: _Amount = None


class _Scaled(msgspec.Struct, rename="camel"):
    enabled: bool = False
    min_replica_count: int = 1
    max_replica_count: int = 10


class _Model(msgspec.Struct, rename="camel"):
    model_url: str = msgspec.field(name="modelURL")
    enabled: bool = True
    replica_count: int = 1
    request_gpu: _Amount = msgspec.field(name="requestGPU", default=None)
    request_cpu: _Amount = msgspec.field(name="requestCPU", default=None)
    vllm_config: dict[str, Any] = {}
    enable_lora: bool = msgspec.field(name="enableLoRA", default=False)
    enable_tool: bool = False
    tool_call_parser: str | None = None
    lmcache_config: _Offload | None = None
    keda: _Scaled | None = None
    env: list[_Variable] = []
    hf_token: Any = msgspec.field(name="hf_token", default=None)
    chat_template: str | None = None


class _Engines(msgspec.Struct, rename="camel"):
    model_spec: list[_Model]
    vllm_api_key: str | dict[str, Any] | None = None


class _Values(msgspec.Struct, rename="camel"):
    serving_engine_spec: _Engines


def from_production_stack(raw: Mapping[str, Any]) -> ImportedDeployment:
    """The deployment of the chart's values; what has no counterpart is named in the notes.

    How pods are made (images, volumes, nodes) is no part of a deployment file. Raises
    :class:`policy.errors.ConfigError` for values of another type, and if no model is enabled.
    """
    engines = convert(raw, _Values, "").serving_engine_spec
    notes: list[str] = []
    document: dict[str, Any] = {"models": [], "budget": {}}
    for number, spec in enumerate(engines.model_spec):
        if spec.enabled:
            at = f"servingEngineSpec.modelSpec[{number}]"
            document["models"].append(_model(spec, at, document["budget"], notes))
    if not document["models"]:
        expected = "a model that is enabled"
        raise ConfigError(
            "servingEngineSpec.modelSpec", [each.model_url for each in engines.model_spec], expected
        )
    document["gateway"] = {"host": "127.0.0.1", "port": PORT, "admin_port": PORT + 1}
    key = engines.vllm_api_key
    if isinstance(key, str) and key:
        document["tenants"] = [{"name": "default", "keys_sha256": [digest_of(key.encode())]}]
    elif isinstance(key, dict) and key.get("secretName"):
        notes.append("servingEngineSpec.vllmApiKey is in a secret: create a key with `tidegate keys create`")
    return ImportedDeployment(document, notes)


def _model(spec: _Model, at: str, budget: dict[str, int], notes: list[str]) -> dict[str, Any]:
    """The model; the most that its replicas take is added to the ``budget``."""
    config = dict(spec.vllm_config)
    extra = [str(word) for word in config.pop("extraArgs", None) or []]
    given = {_FLAGS[name]: value for name, value in config.items() if name in _FLAGS} | read_flags(extra)
    if given.get("runner") == "auto":
        del given["runner"]
    given |= {"enable_lora": True} if spec.enable_lora else {}
    given |= {"enable_auto_tool_choice": True} if spec.enable_tool else {}
    given |= {"tool_call_parser": spec.tool_call_parser} if spec.tool_call_parser else {}
    offload = spec.lmcache_config
    if offload is not None and offload.enabled and offload.cpu_offloading_buffer_size:
        given["kv_offloading_size"] = float(offload.cpu_offloading_buffer_size)
        notes.append(f"{at}.lmcacheConfig became vLLM's own KV offload of the same size")
    scaled = spec.keda
    if scaled is not None and scaled.enabled:
        least, most = scaled.min_replica_count, scaled.max_replica_count
    else:
        least = most = spec.replica_count
    tensor_parallel = given["tensor_parallel_size"] = int(given.get("tensor_parallel_size") or 1)
    cores = int(float(spec.request_cpu or 1))
    gpus = tensor_parallel * most if float(spec.request_gpu or 0) > 0 else 0
    model = model_entry(spec.model_url, given, MachineResources(gpus=gpus, cpus=cores, bfloat16=True))
    if gpus:
        budget["gpus"] = budget.get("gpus", 0) + gpus
    else:
        budget["cpus"] = budget.get("cpus", 0) + cores * most
    is_fixed = least == most
    model["modes"]["multi-replica"]["replicas"] = least if is_fixed else {"min": least, "max": most}
    model["control"]["policy"] = "static" if is_fixed else "predictive"
    env = {each.name: str(each.value) for each in spec.env if each.value is not None}
    if kept := {name: value for name, value in env.items() if name not in FORBIDDEN_ENV}:
        model["env"] = kept
    if spec.hf_token:
        notes.append(f"{at}.hf_token is not copied: write it to a file, and set token_file")
    if spec.chat_template:
        notes.append(f"{at}.chatTemplate is left out: set engine_args.chat_template to its file")
    return model
