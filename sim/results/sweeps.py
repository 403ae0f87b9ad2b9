"""How far each policy can be turned, from careful to thrifty: the ladders on which it is judged.

Rivals are set in units that depend on the engine: requests at once, parts of a KV cache. They get what a
replica shows at the rate that it attains (:mod:`sim.oracle.replica_capacity`), as somebody would who tunes
them with care, and are then turned around it. The rungs of ``predictive`` have the shipped parameters among
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from policy.config.control import Choice
from policy.scaling.policies.predictive import PredictiveParameters
from policy.scaling.policies.token_saturation import TokenSaturationParameters

# What is aimed at, in parts of what a replica shows at the rate that it attains.
PARTS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.15)
# Which rung of ``predictive`` has the shipped parameters.
SHIPPED = 2
# What it is turned by: who saves also believes a change of the rate later, and for less long.
_CAREFUL = {"quantile": 0.95, "margin": 1.12, "down": 0.95, "full": 0.85}
_THRIFTY = {"quantile": 0.5, "margin": 1.0, "level_s": 120.0, "trend_s": 120.0, "lasts_s": 60.0}
CAREFUL_TO_THRIFTY: tuple[dict[str, float], ...] = (
    {**_CAREFUL, "quantile": 0.99, "margin": 1.25, "down": 0.85},
    _CAREFUL,
    {"full": PredictiveParameters().full},
    {"full": 0.92},
    {**_THRIFTY, "full": 0.92},
    {**_THRIFTY, "full": 1.0},
    {**_THRIFTY, "full": 1.0, "level_s": 240.0, "trend_s": 240.0, "lasts_s": 30.0},
)


class Full(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica shows at the rate that it attains, and how many there may be.

    ``at_once`` requests wait or run on average, and ``kv_used`` of its KV cache is in use (0..1).
    A count that never changes is tried from ``least`` to ``most``.
    """

    at_once: float
    kv_used: float
    least: int
    most: int


def ladder(name: str, full: Full) -> tuple[Choice, ...]:
    """The settings of the built-in policy ``name``, from careful to thrifty, as a document would choose them.

    Raises :class:`KeyError` for another one.
    """
    return LADDERS[name](full)


def _static(full: Full) -> tuple[Choice, ...]:
    counts = np.unique(np.linspace(full.least, full.most, len(PARTS)).round().astype(int))
    return tuple({"static": {"replicas": int(count)}} for count in counts[::-1])


def _target_tracking(full: Full) -> tuple[Choice, ...]:
    return tuple(
        {"target_tracking": {"metric": "concurrency", "target": part * full.at_once}} for part in PARTS
    )


def _panic_window(full: Full) -> tuple[Choice, ...]:
    # Of the requests at once it aims at no more than all, so the part is taken there.
    return tuple({"panic_window": {"concurrency": part * full.at_once, "utilisation": 1.0}} for part in PARTS)


def _token_saturation(full: Full) -> tuple[Choice, ...]:
    usual = TokenSaturationParameters()
    thresholds = {"scale_up": usual.scale_up, "scale_down": usual.scale_down}
    # A cache takes no more than it holds, so a crowded one has fewer rungs.
    taken = dict.fromkeys(min(1.0, part * full.kv_used / usual.scale_up) for part in PARTS)
    return tuple({"token_saturation": {"kv": kv, **thresholds}} for kv in taken)


def _predictive(full: Full) -> tuple[Choice, ...]:
    return tuple({"predictive": rung} for rung in CAREFUL_TO_THRIFTY)


LADDERS: Mapping[str, Callable[[Full], tuple[Choice, ...]]] = {
    "static": _static,
    "target_tracking": _target_tracking,
    "panic_window": _panic_window,
    "token_saturation": _token_saturation,
    "predictive": _predictive,
}
