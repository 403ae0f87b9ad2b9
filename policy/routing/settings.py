"""The settings of a router, read from a model's section of the deployment."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from policy.config.deployment import AdaptersConfig, ModelSpec
from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import Timing
from policy.engine.prefill_estimate import GENERIC
from policy.errors import ConfigError

# The fraction of the TTFT SLO that may pass before the prefill of a request starts; the rest is for it.
START_SHARE: Final = 0.5
_DEGREES = (1, 2, 4, 8)


@dataclass(slots=True, frozen=True)
class RoutingSettings:
    """What the deployment says about the routing of one model.

    ``assumed`` is the timing of a replica that reports none. ``start_s`` is how long a request may wait at a
    replica before its prefill starts, ``itl_s`` the longest step, both in seconds. ``slots`` is the number of
    adapter slots per replica.
    """

    assumed: Timing = GENERIC
    start_s: float = math.inf
    itl_s: float = math.inf
    slots: int = 8


def settings_of(spec: ModelSpec) -> RoutingSettings:
    slo = spec.control.strictest_slo
    return RoutingSettings(
        assumed=_assumed(spec),
        start_s=math.inf if slo.ttft_p95_s is None else START_SHARE * slo.ttft_p95_s,
        itl_s=math.inf if slo.itl_p95_s is None else slo.itl_p95_s,
        slots=(spec.adapters or AdaptersConfig()).slots_per_replica,
    )


def _assumed(spec: ModelSpec) -> Timing:
    name = spec.timed_by
    if name is None:
        return GENERIC
    found = profile(name)
    for degree in _DEGREES:
        with suppress(ConfigError):  # its weights need more GPUs
            return found.timing(degree)
    return GENERIC
