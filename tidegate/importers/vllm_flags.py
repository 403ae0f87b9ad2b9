"""The flags of `vllm serve` as a deployment file: a model, the gateway and its tenants."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from policy.config.deployment import FORBIDDEN_ENV
from policy.config.engine_arguments import expected_instead
from policy.errors import ConfigError
from store.key_derivation import digest_of

# vLLM's own, where its clients expect it.
PORT = 8000
_SHORT = {
    "-tp": "tensor_parallel_size",
    "-dp": "data_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-q": "quantization",
    "-O": "optimization_level",
}
# They take all words up to the next flag.
_LISTS = frozenset(
    {
        "served_model_name", "lora_modules", "api_key", "middleware", "allowed_media_domains",
        "cudagraph_capture_sizes", "disable_access_log_for_endpoints", "logits_processors",
        "ignore_patterns", "default_mm_loras", "lora_target_modules", "numa_bind_nodes", "numa_bind_cpus",
    }
)  # fmt: skip
# Sizes that vLLM also reads with a suffix: k is 1000, K is 1024.
_SIZES = frozenset(
    {
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
    }
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = "kmgt"
# Numbers and words of YAML, which no name of a model or a parser is.
_SCALAR = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.IGNORECASE)


@dataclass
class MachineResources:
    """What replicas may use: ``gpus``, else ``cpus``; ``bfloat16`` is whether the CPU computes it."""

    gpus: int
    cpus: int
    bfloat16: bool = False


@dataclass
class ImportedDeployment:
    """A deployment file's content, and ``notes`` on what a reader of the flags would not expect."""

    document: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def translate(
    words: Sequence[str], environment: Mapping[str, str], machine: MachineResources
) -> ImportedDeployment:
    """The deployment of ``vllm serve WORDS``.

    Raises :class:`policy.errors.ConfigError` for a flag that vLLM does not have or that Tidegate cannot carry
    out, with what to do instead.
    """
    given = read_flags(words)
    model = str(given.pop("model", "") or "")
    if not model:
        raise ConfigError("MODEL", "", "a model: ORG/NAME of the Hugging Face hub, or a folder")
    notes: list[str] = []
    gateway = _gateway(given, notes)
    keys = [str(key) for key in _listed(given.pop("api_key", None) or environment.get("VLLM_API_KEY"))]
    entry = model_entry(model, given, machine)
    variables = {name: value for name, value in sorted(environment.items()) if name.startswith("VLLM_")}
    if kept := {name: value for name, value in variables.items() if name not in FORBIDDEN_ENV}:
        entry["env"] = kept | entry.get("env", {})
    document: dict[str, Any] = {"models": [entry], "budget": _budget(machine), "gateway": gateway}
    if keys:
        digests = [digest_of(key.encode()) for key in keys]
        document["tenants"] = [{"name": "default", "keys_sha256": digests}]
    return ImportedDeployment(document, notes)


def model_entry(model: str, given: dict[str, Any], machine: MachineResources) -> dict[str, Any]:
    """The section of ``models`` for vLLM's arguments ``given`` (names in snake_case), which it uses up."""
    names = [str(name) for name in _listed(given.pop("served_model_name", None))]
    if len(names) > 1:
        raise ConfigError(_flag("served_model_name"), " ".join(names), "one name: a model has one name here")
    is_path = model.startswith((".", "/", "~")) or Path(model).is_dir()
    source = str(Path(model).expanduser().resolve()) if is_path else model
    revision = given.pop("revision", None)
    if revision and not is_path:
        source += f"@{revision}"
    # As vLLM, the model is called as it is named, but for the path of a folder or the scheme of a source.
    own = Path(source).name if is_path else model.rpartition(":")[2]
    entry: dict[str, Any] = {"name": names[0] if names else own, "source": source, "engine": "vllm"}
    if (runner := given.pop("runner", None)) in ("pooling", "generate"):
        entry["runner"] = runner
    tensor_parallel = _count(given, "tensor_parallel_size") or 1
    replicas = _count(given, "data_parallel_size")
    adapters = _adapters(given)
    # Requests are never logged; former releases of vLLM had this flag.
    given.pop("disable_log_requests", None)
    if tensor_parallel > max(machine.gpus, 1):
        expected = f"at most {max(machine.gpus, 1)}: this machine has {machine.gpus} GPUs"
        raise ConfigError(_flag("tensor_parallel_size"), tensor_parallel, expected)
    shape: dict[str, Any]
    if machine.gpus:
        shape = {"gpus": tensor_parallel, "tensor_parallel": tensor_parallel}
        most = machine.gpus // tensor_parallel
    else:
        shape, most = {"cpus": machine.cpus}, 1
        given.setdefault("enforce_eager", True)
        if not machine.bfloat16:
            given.setdefault("dtype", "float32")
    if replicas is not None and replicas > most:
        raise ConfigError(_flag("data_parallel_size"), replicas, f"1 to {most} replicas on this machine")
    _check(given)
    if given:
        entry["engine_args"] = given
    entry["shapes"] = {"replica": shape}
    fixed = replicas is not None or most == 1
    bounds: Any = replicas or 1 if fixed else {"min": 1, "max": most}
    entry["modes"] = {"multi-replica": {"shape": "replica", "replicas": bounds}}
    if adapters is not None:
        entry["adapters"] = adapters
    entry["control"] = {"policy": "static"} if fixed else {"policy": "predictive"}
    entry["control"]["start_timeout_s"] = 1800
    return entry


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """The flags in ``words`` by name in snake_case; a first word without a dash is the ``model``."""
    given: dict[str, Any] = {}
    rest = list(words)
    if rest and not rest[0].startswith("-"):
        given["model"] = rest.pop(0)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _SHORT:
            name = _SHORT[name]
        elif word[:2] == "-O" and word[2:].isdigit():
            name, equals, value = "optimization_level", "=", word[2:]
        elif name.startswith("--"):
            name = name[2:].replace("-", "_")
        else:
            raise ConfigError("vLLM's flags", word, "a flag such as --max-model-len 8192")
        values = [value] if equals else []
        while not equals and rest and not _is_flag(rest[0]) and (not values or name in _LISTS):
            values.append(rest.pop(0))
        _put(given, name, values)
    if (file := given.pop("config", None)) is not None:
        given = _config_file(str(file)) | given
    return given


def _put(given: dict[str, Any], name: str, values: list[str]) -> None:
    name, _, path = name.partition(".")
    if not values and name.startswith("no_") and not path:
        given[name[3:]] = False
    elif path:  # vLLM's --speculative-config.method ngram
        parts = path.split(".")
        inner = given.setdefault(name, {})
        for part in parts[:-1]:
            inner = inner.setdefault(part, {})
        inner[parts[-1]] = _value(name, values[0]) if values else True
    elif not values:
        given[name] = True
    elif name in _LISTS:
        given[name] = [_value(name, value) for value in values]
    else:
        given[name] = _value(name, values[0])


def _value(name: str, text: str) -> Any:
    if name in _SIZES and (size := _SIZE.fullmatch(text)):
        base = 1024 if size[2].isupper() else 1000
        return int(float(size[1]) * base ** (_POWERS.index(size[2].lower()) + 1))
    if _SCALAR.fullmatch(text) or text[:1] in ("{", "["):
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(_flag(name), text, "JSON") from None
    return text


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _SCALAR.fullmatch(word)


def _config_file(path: str) -> dict[str, Any]:
    """vLLM's own configuration file: its flags without dashes."""
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("--config", path, f"a YAML file of vLLM's flags ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError("--config", path, "a YAML mapping of vLLM's flags")
    return {str(name).replace("-", "_"): value for name, value in found.items()}


def _gateway(given: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    port = _count(given, "port") or PORT
    gateway: dict[str, Any] = {"host": given.pop("host", None), "port": port}
    if gateway["host"] is None:
        gateway["host"] = "127.0.0.1"
        notes.append("it listens on this machine only: vLLM's default is every address (--host 0.0.0.0)")
    gateway["admin_port"] = port + 1
    if (origins := given.pop("allowed_origins", None)) is not None:
        gateway["cors"] = _listed(origins)
    certificate, key = given.pop("ssl_certfile", None), given.pop("ssl_keyfile", None)
    if certificate or key:
        gateway["tls"] = {"cert_file": certificate, "key_file": key}
    return gateway


def _adapters(given: dict[str, Any]) -> dict[str, Any] | None:
    """The section ``adapters``, if LoRA is on; vLLM's static modules become declared adapters."""
    modules = _listed(given.pop("lora_modules", None))
    slots, rank = _count(given, "max_loras"), _count(given, "max_lora_rank")
    if not (given.pop("enable_lora", False) or modules):
        return None
    section: dict[str, Any] = {}
    if slots is not None:
        section["slots_per_replica"] = slots
    if rank is not None:
        section["max_rank"] = rank
    sources = []
    for module in modules:
        if isinstance(module, dict):
            name, path = str(module.get("name", "")), str(module.get("path", ""))
        else:
            name, _, path = str(module).partition("=")
        if not name or not path:
            raise ConfigError(_flag("lora_modules"), module, "NAME=PATH, or JSON with name and path")
        is_hub = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path) is not None and not Path(path).exists()
        source = {"source": f"hf:{path}"} if is_hub else {"path": str(Path(path).expanduser().resolve())}
        sources.append({"name": name, **source})
    if sources:
        section["sources"] = sources
    return section


def _count(given: dict[str, Any], name: str) -> int | None:
    """Take the flag ``name``, which is a number from 1."""
    value = given.pop(name, None)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ConfigError(_flag(name), value, "a whole number from 1")
    return value


def _check(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if expected := expected_instead(name, value):
            raise ConfigError(_flag(name), value, expected)


def _budget(machine: MachineResources) -> dict[str, int]:
    return {"gpus": machine.gpus} if machine.gpus else {"cpus": machine.cpus}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
