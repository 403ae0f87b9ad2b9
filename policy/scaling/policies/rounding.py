"""Rounding to whole replicas, and the encoding of state, for all policies."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

M = TypeVar("M", bound=msgspec.Struct)

# Larger metrics are cut off, so that products of a few of them stay finite.
HUGE = 1e9
# A sum of floats may exceed a whole number by this without another replica.
_SLACK = 1e-6


def is_usable(value: float) -> float:
    """``value`` within 0 and :data:`HUGE`."""
    return min(max(value, 0.0), HUGE)


def whole(replicas: float) -> int:
    """``replicas`` rounded up."""
    return math.ceil(min(replicas, HUGE) - _SLACK)


def per_replica(demand: float, each: float) -> float:
    """How many replicas of capacity ``each`` a ``demand`` needs; 0 if the capacity is unknown."""
    return min(is_usable(demand) / each, HUGE) if each > 0 else 0.0


def encode_state(memory: msgspec.Struct | None) -> Any:
    """The state as JSON values, as the journal keeps it."""
    return msgspec.json.decode(msgspec.json.encode(memory))


def decode_state(memory: Any, kind: type[M]) -> M | None:
    """What :func:`encode_state` returned; ``None`` at first, and for the state of another policy."""
    try:
        return msgspec.convert(memory, kind)
    except msgspec.ValidationError:
        return None
