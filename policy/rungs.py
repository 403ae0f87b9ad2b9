"""What a mode's replicas are taken to be before they ran: how fast by their profile, and at what price."""

from __future__ import annotations

import sys

import msgspec

from policy.config import Budget, ModelSpec, Shape
from policy.engine_model import Timing
from policy.errors import ConfigError
from policy.pace import GENERIC
from policy.profiles import profile
from policy.types import EngineKind


def shipped(spec: ModelSpec, shape: Shape) -> Timing:
    """How fast a replica of ``shape`` is as far as its profile says: none was calibrated yet."""
    name = spec.timed_by
    degree = shape.tensor_parallel if shape.gpus else max(1, shape.cpus)
    timing = GENERIC
    if name is not None:
        found = profile(name)
        try:
            timing = Timing(limits=found.limits(degree), model=found.model.at_degree(degree))
        except ConfigError:  # by its profile the model does not fit there: it does, for it runs
            timing = GENERIC
    if spec.engine is EngineKind.SIM and timing.model is not None and spec.profile is None:
        timing = msgspec.structs.replace(timing, model=timing.model.faster(spec.sim.speed))
    args = {**spec.engine_args, **shape.engine_args}
    given = {
        key: args[key] for key in ("max_num_batched_tokens", "max_num_seqs") if _is_positive(args.get(key))
    }
    limits = msgspec.structs.replace(timing.limits, **given)
    seats = min(limits.max_num_seqs, shape.max_in_flight)
    return msgspec.structs.replace(timing, limits=msgspec.structs.replace(limits, max_num_seqs=seats))


def longest(spec: ModelSpec, shape: Shape) -> int | None:
    """The most tokens of prompt and answer that a request at a replica of ``shape`` may have together.

    As engines have it: what the document gives, else what the profile says, as far as KV cache holds it;
    ``None`` where neither says. An engine refuses what is longer.
    """
    given = {**spec.engine_args, **shape.engine_args}.get("max_model_len")
    if isinstance(given, int) and given > 0:
        return given
    name = spec.timed_by
    if name is None:
        return None
    return min(profile(name).max_model_len, shipped(spec, shape).limits.kv_tokens or sys.maxsize)


def _is_positive(given: object) -> bool:
    return isinstance(given, int) and given > 0


def price_of(shape: Shape, budget: Budget) -> float:
    """What one replica of ``shape`` costs in an hour, in the currency of the budget."""
    return shape.gpus * budget.gpu_cost_per_h + shape.cpus * budget.cpu_cost_per_h
