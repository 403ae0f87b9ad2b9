"""The engine port over the simulation: from an :class:`EngineSpec` to an app and its step loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from policy.engine.builtin_profiles import batch_limits, host_kv_tokens, profile
from policy.engine.performance_model import BLOCK, Timing
from policy.engine.prefix_cache import PrefixCache
from policy.engine.step_samples import StepSample
from policy.errors import AdapterRefused, EngineFailed, PreconditionFailed
from policy.routing.engine_prefix_index import KvBlockIndex
from serve.engine.interface import ASGIApp, EngineSpec, EngineStats
from serve.engine.sim.app import build
from serve.engine.sim.generation_service import GenerationService
from serve.engine.sim.metrics import SimEngineMetrics
from serve.engine.sim.step_loop import StepLoop

Positive = Annotated[int, Meta(ge=1)]


class SimArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The engine arguments that change a simulation; vLLM's others are accepted and change nothing.

    ``num_gpu_blocks_override`` is the KV cache in blocks of 16 tokens, ``kv_offloading_size`` the GiB of
    evicted blocks that host memory keeps, ``lora_modules`` maps the names of adapters that are always loaded,
    beside the slots, to their paths, which are not read.
    """

    max_num_batched_tokens: Positive | None = None
    max_num_seqs: Positive | None = None
    max_model_len: Annotated[int, Meta(ge=2)] | None = None
    num_gpu_blocks_override: Positive | None = None
    enable_prefix_caching: bool = True
    kv_offloading_size: Annotated[float, Meta(gt=0)] | None = None
    lora_modules: dict[str, str] = {}


class SimEngine:
    """One simulated engine in this process."""

    def __init__(self, spec: EngineSpec) -> None:
        try:
            args = msgspec.convert(spec.engine_args, SimArgs)
        except msgspec.ValidationError as error:
            raise EngineFailed(f"engine_args: {error}") from None
        timing = profile(spec.sim.profile, "sim.profile")
        degree = spec.cpus or (spec.tensor_parallel if spec.share == 1 else spec.share)
        limits = timing.limits(degree)
        if args.num_gpu_blocks_override is not None:
            limits = msgspec.structs.replace(limits, kv_tokens=BLOCK * args.num_gpu_blocks_override)
        limits = batch_limits(limits, spec.engine_args, args.max_model_len or timing.max_model_len)
        if args.max_model_len is not None and args.max_model_len > limits.kv_tokens:
            raise EngineFailed(
                f"max_model_len {args.max_model_len} is larger than the {limits.kv_tokens} tokens of KV cache"
            )
        length = args.max_model_len or min(timing.max_model_len, limits.kv_tokens)
        metrics = SimEngineMetrics(spec.model)
        model = timing.model.at_degree(degree)
        self._timing = Timing(limits=limits, model=model.faster(spec.sim.speed))
        caching = args.enable_prefix_caching
        host = host_kv_tokens(spec.engine_args, spec.sim.profile)
        self._cache = PrefixCache(limits.kv_tokens, host_tokens=host, reports=True) if caching else None
        self.blocks: KvBlockIndex | None = KvBlockIndex(BLOCK) if caching else None
        self._loop = StepLoop(model, limits, spec.sim.speed, metrics, self._cache, blocks=self.blocks)
        self._wake_s = spec.sim.wake_s or 0.0
        self.adapter_slots = spec.adapter_slots
        self._load_s = spec.sim.adapter_load_s
        # The service serves exactly these as models.
        self._adapters = dict(args.lora_modules)
        self._static = frozenset(args.lora_modules)
        self.max_model_len: int | None = length
        service = GenerationService(
            model=spec.model,
            adapters=self._adapters,
            runner=spec.runner,
            max_model_len=length,
            seed=spec.sim.seed,
            loop=self._loop,
            metrics=metrics,
            has_adapters=bool(spec.adapter_slots or args.lora_modules),
        )
        self.app: ASGIApp = build(service)

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def take_steps(self) -> tuple[StepSample, ...]:
        return self._loop.took.take()

    def timing(self) -> Timing:
        return self._timing

    def adapters(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    async def load(self, name: str, path: Path) -> None:
        if name in self._adapters:
            return
        if len(await self.loaded()) >= self.adapter_slots:
            raise AdapterRefused("no_slots", f"all {self.adapter_slots} slots are taken")
        await self._loop.hold_up(self._load_s)
        if not (path / "adapter_config.json").is_file():
            raise AdapterRefused("engine_refused", f"no adapter found for {name} at {path}")
        self._adapters[name] = str(path)

    async def unload(self, name: str) -> None:
        if name not in self._static:
            self._adapters.pop(name, None)

    async def loaded(self) -> frozenset[str]:
        return frozenset(self._adapters.keys() - self._static)

    async def sleep(self) -> None:
        await self._loop.idle()
        if self._cache is not None:
            self._cache.clear()
            self._loop.report_cache()

    async def wake(self) -> None:
        await asyncio.sleep(self._wake_s)

    async def profile(self, seconds: float) -> Path:
        raise PreconditionFailed(f"the simulated engine has no operators to record for {seconds:g} s")

    @property
    def dead(self) -> bool:
        return self._loop.ended

    async def check(self) -> None:
        self._loop.check()

    async def close(self) -> None:
        await self._loop.close()


async def create(spec: EngineSpec) -> SimEngine:
    """Start the engine that ``spec`` describes, after ``spec.sim.start_s`` seconds of cold start.

    Raises :class:`policy.errors.ConfigError` for an unknown profile or one whose weights do not fit, and
    :class:`policy.errors.EngineFailed` for invalid engine arguments.
    """
    await asyncio.sleep(spec.sim.start_s)
    return SimEngine(spec)
