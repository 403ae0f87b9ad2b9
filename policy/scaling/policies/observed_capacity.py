"""The capacity per replica as observed: the rate of each, over the fraction of its KV cache in use.

The engine model covers one replica and one request length; a pool absorbs bursts better, and each mix of
lengths fills caches differently. The longer latencies are well within the SLO, the more this is trusted.
"""

from __future__ import annotations

import math

import msgspec

from policy.scaling.policies.rounding import is_usable
from policy.scaling.view import View

# The time constant of the means: longer than an answer, shorter than a change of the load.
MEAN_S = 180.0
# The capacity is extrapolated to at most this multiple of the observed rate.
FURTHER = 2.0
# Trust is lost within LOST_S of latencies near the SLO, and restored within WON_S of good ones.
LOST_S, WON_S = 300.0, 120.0
# Latencies below this fraction of the SLO are well within it.
ROOM = 0.75
# The least cache use that counts.
_LEAST_USED = 0.02


class ObservedCapacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The mean ``rate`` (requests per second) and KV use per replica of a mode, from ``since`` to ``at``.

    ``trust`` (0..1) weighs the conclusion; ``mu`` is the last assumed capacity of a replica.
    """

    mode: str
    rate: float = 0.0
    used: float = 0.0
    mu: float = 0.0
    trust: float = 1.0
    since: float
    at: float


def observe_capacity(before: ObservedCapacity | None, view: View, mu: float) -> ObservedCapacity:
    """The state after this view, with an assumed capacity ``mu``; a new one for another mode."""
    if before is None or before.mode != view.mode:
        before = ObservedCapacity(since=view.at, at=view.at, mode=view.mode)
    demand, figures = view.signals.demand, view.signals.replicas
    if demand is None or not figures:
        return before
    rate = is_usable(demand.arrivals.last_20_s) / len(figures)
    used = sum(min(is_usable(each.kv_used), 1.0) for each in figures) / len(figures)
    elapsed_s = max(0.0, view.at - before.at)
    # Young means cover all observations.
    age_s = max(elapsed_s, min(MEAN_S, view.at - before.since))
    part = -math.expm1(-elapsed_s / age_s) if before.used and age_s > 0 else 1.0
    return ObservedCapacity(
        at=view.at,
        mode=view.mode,
        since=before.since,
        rate=before.rate + part * (rate - before.rate),
        used=before.used + part * (used - before.used),
        trust=_trusted(before.trust, elapsed_s, view),
        mu=mu,
    )


def sustained(proof: ObservedCapacity | None, view: View, alone: float, full: float) -> float:
    """The capacity of one replica in requests per second, at least ``alone``, that of the engine model.

    It is at most ``full`` (0..1) of the saturation rate, by the model and by cache use, and smoothed over the
    start-up time.
    """
    if proof is None or proof.mode != view.mode:
        return alone
    now = alone
    if proof.used >= _LEAST_USED:
        most = full * is_usable(view.capability.mu_max)
        room = min(proof.rate * full / proof.used, FURTHER * proof.rate, most)
        now += proof.trust * max(0.0, room - alone)
    if not proof.mu:
        return now
    over_s = min(max(view.lead_s, view.tick_s), MEAN_S)
    return proof.mu + (now - proof.mu) * -math.expm1(-max(0.0, view.at - proof.at) / over_s)


def _trusted(before: float, elapsed_s: float, view: View) -> float:
    if _late(view):
        return max(0.0, before - elapsed_s / LOST_S)
    return min(1.0, before + elapsed_s / WON_S)


def _late(view: View) -> bool:
    demand, slo = view.signals.demand, view.slo
    assert demand is not None
    pairs = ((demand.ttft, slo.ttft_p95_s), (demand.itl, slo.itl_p95_s))
    near = any(seen.p95 > ROOM * limit for seen, limit in pairs if seen and seen.count and limit is not None)
    return near or demand.met.both < slo.attainment
