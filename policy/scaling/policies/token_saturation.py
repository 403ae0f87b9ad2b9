"""Saturation of the KV caches in tokens, as in the workload-variant autoscaler of llm-d.

The capacity of a replica is ``k1``, 0.8 of its KV cache, or ``k2``, the tokens in use when requests began to
wait in its engine, if less. It scales up above 0.85 of that on average, down below 0.70.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from policy.config.control import Section
from policy.scaling.policies.rounding import decode_state, encode_state, is_usable, per_replica, whole
from policy.scaling.view import Proposal, View
from policy.signals.types import ReplicaSample

# The weight of one observed queue in k2.
_STEP = 0.3
# The number of modes whose k2 is kept.
MODES = 8


class SaturationSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens in use at which a replica of each mode began to queue: ``k2``."""

    k2: dict[str, float]


class SaturationState(msgspec.Struct, frozen=True):
    """``demand`` in tokens, and ``each``, the capacity of a replica in tokens."""

    demand: float
    each: float

    @property
    def replicas(self) -> float:
        """How many replicas the demand fills."""
        return per_replica(self.demand, self.each)


def saturation(
    view: View, k2: float | None, kv: float = 0.8, *, queued: bool = True
) -> SaturationState | None:
    """The tokens in use and of waiting requests; ``None`` if the size of the KV cache is unknown.

    Without ``queued`` only requests that wait in engines count.
    """
    demand = view.signals.demand
    size = is_usable(view.capability.kv_tokens)
    if demand is None or not size:
        return None
    used = sum(min(is_usable(replica.kv_used), 1.0) for replica in view.signals.replicas) * size
    waiting = sum(replica.waiting for replica in view.signals.replicas) + (demand.queued if queued else 0)
    # The mean length of a request, halfway through its output.
    length = is_usable(demand.input_tokens) + is_usable(demand.output_tokens) / 2
    most = kv * size
    return SaturationState(
        used + is_usable(waiting) * min(length, size), most if k2 is None else min(k2, most)
    )


def learned(view: View, k2: float | None, queue: int = 5) -> float | None:
    """``k2`` after this view, moved towards the use of engines in which requests wait."""
    size = is_usable(view.capability.kv_tokens)
    full = [_in_use(replica) for replica in view.signals.replicas if _queues(replica, queue)]
    if not full or not size:
        return k2
    now = size * sum(full) / len(full)
    return now if k2 is None else k2 + _STEP * (now - k2)


def _queues(replica: ReplicaSample, queue: int) -> bool:
    # Requests that wait for an adapter slot do not count, nor the queue of an engine that is almost empty.
    return replica.waiting - replica.deferred >= queue and _in_use(replica) >= 0.1


def _in_use(replica: ReplicaSample) -> float:
    return min(is_usable(replica.kv_used), 1.0)


class TokenSaturation(Section, frozen=True):
    """The policy; its memory is ``k2``, used from the next decision on.

    Replicas are added above ``scale_up`` of the capacity and removed below ``scale_down``. ``kv`` is the
    usable fraction of the KV cache; with ``queue`` waiting requests an engine counts as full.
    """

    kv: Annotated[float, Meta(gt=0, le=1)] = 0.8
    queue: Annotated[int, Meta(ge=1, le=10_000)] = 5
    scale_up: Annotated[float, Meta(gt=0, le=1)] = 0.85
    scale_down: Annotated[float, Meta(gt=0, le=1)] = 0.70

    def __post_init__(self) -> None:
        if self.scale_down > self.scale_up:
            raise ValueError(f"scale_down of at most scale_up = {self.scale_up:g}")

    def decide(self, view: View, memory: Any) -> Proposal:
        """The count that keeps replicas between both thresholds."""
        before = decode_state(memory, SaturationSample)
        sample = before or SaturationSample({})
        k2 = sample.k2.get(view.mode)
        full = saturation(view, k2, self.kv)
        if full is None:
            reported = view.signals.demand is not None
            why = "the size of the KV cache is unknown" if reported else "no gateway has reported"
            return view.hold(encode_state(before), why)
        sample = SaturationSample(with_mode(sample.k2, view.mode, learned(view, k2, self.queue)))
        up = full.replicas / self.scale_up
        down = full.replicas / self.scale_down
        count = view.count
        if up > count:
            count = whole(up)
        elif down < view.supply.serving and not view.supply.starting_s:
            count = whole(down)
        return Proposal(
            count=view.within(count),
            reason=f"{full.demand:.0f} tokens in use or queued, {full.each:.0f} per replica",
            terms={"required": up, "enough": down},
            memory=encode_state(sample),
            unbounded=view.unbounded(count),
        )


def with_mode(before: dict[str, float], mode: str, k2: float | None) -> dict[str, float]:
    """``before`` with the ``k2`` of a mode added or replaced; beyond :data:`MODES` the oldest is dropped."""
    if k2 is None:
        return before
    others = [(name, value) for name, value in before.items() if name != mode][-(MODES - 1) :]
    return dict([*others, (mode, k2)])
