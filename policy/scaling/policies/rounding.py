"""What policies share: whole replicas of a figure, a memory read back, and what to answer when blind."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from policy.scaling.view import Proposal, View

M = TypeVar("M", bound=msgspec.Struct)

# No figure is read as larger, so that products of a few of them stay finite.
HUGE = 1e9
# What a sum of floats may be above a whole number without a replica more.
_SLACK = 1e-6


def is_usable(value: float) -> float:
    """A figure as it may be computed with: neither negative nor beyond all reason."""
    return min(max(value, 0.0), HUGE)


def whole(replicas: float) -> int:
    """So many replicas, and a started one counts."""
    return math.ceil(min(replicas, HUGE) - _SLACK)


def within(view: View, count: int) -> int:
    """``count`` within the bounds of the mode; while anybody asks at least one."""
    return max(view.least, min(max(count, 1 if asked(view) else 0), view.most))


def per_replica(demand: float, each: float) -> float:
    """How many replicas of which ``each`` takes so much a ``demand`` needs; 0 where that is not known."""
    return min(is_usable(demand) / each, HUGE) if each > 0 else 0.0


def blind(view: View, memory: Any, why: str) -> Proposal:
    """Keep what there is, and what was remembered: a policy that sees nothing changes nothing."""
    return Proposal(count=view.count, reason=why, memory=memory)


def asked(view: View) -> bool:
    """Whether anybody wants anything of the model."""
    demand = view.signals.demand
    return demand is not None and (
        demand.queued > 0 or demand.concurrency.last_6_s > 0 or demand.arrivals.last_6_s > 0
    )


def encode_state(memory: msgspec.Struct | None) -> Any:
    """The memory as it is in the log, and as it will be read from there."""
    return msgspec.json.decode(msgspec.json.encode(memory))


def decode_state(memory: Any, kind: type[M]) -> M | None:
    """What :func:`encode_state` wrote; ``None`` at first, and of what another policy wrote."""
    try:
        return msgspec.convert(memory, kind)
    except msgspec.ValidationError:
        return None
