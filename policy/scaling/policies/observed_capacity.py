"""What replicas take together, as they show: the rate that each was given over the KV cache that it filled.

The engine model knows one replica, and requests of one length. Many share what comes, so that a burst finds
room somewhere, and each mix of lengths fills caches in its own way. The longer requests are well within the
objective, the more it is believed to take the rate at which its cache would be as full as it may be.
"""

from __future__ import annotations

import math

import msgspec

from policy.scaling.policies.rounding import is_usable
from policy.scaling.view import View

# The means are of so long: longer than answers take, shorter than a load of another kind.
MEAN_S = 180.0
# No further beyond what was given is concluded from it.
FURTHER = 2.0
# Latencies that are near the objective for so long end all belief in it, those within it restore all.
LOST_S = 300.0
WON_S = 120.0
# Within the objective by so much a latency says that there is room.
ROOM = 0.75
# Less than this of a cache in use says nothing.
_LEAST_USED = 0.02


class ObservedCapacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As of ``at`` a replica of a mode was given ``rate`` requests per second and filled ``used`` of its KV.

    Both are means over the past while, which began at ``since``. ``trust`` (0..1) is how far what follows
    from them is believed, and ``mu`` what a replica was taken to take.
    """

    at: float
    mode: str
    since: float
    rate: float = 0.0
    used: float = 0.0
    trust: float = 1.0
    mu: float = 0.0


def observe_capacity(before: ObservedCapacity | None, view: View, mu: float) -> ObservedCapacity:
    """What is known after this view, in which a replica was taken to take ``mu``.

    Of another mode that is nothing, and no more than before without figures of replicas.
    """
    if before is None or before.mode != view.mode:
        before = ObservedCapacity(view.at, view.mode, view.at)
    demand, figures = view.signals.demand, view.signals.replicas
    if demand is None or not figures:
        return before
    rate = is_usable(demand.arrivals.last_20_s) / len(figures)
    used = sum(min(is_usable(each.kv_used), 1.0) for each in figures) / len(figures)
    elapsed_s = max(0.0, view.at - before.at)
    # While they are young they are means of all that was seen.
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
    """The requests per second of one replica, of which one ``alone`` takes so many by the model.

    No less than that, and no more than ``full`` (0..1) of what it keeps up with by the model or than fill
    its cache to that part: sharing makes up for chance, and not for what is missing. A start that was asked
    for is not taken back before it is over, so it is a mean over as long as that.
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
    near = any(told.p95 > ROOM * limit for told, limit in pairs if told and told.count and limit is not None)
    return near or demand.met.both < slo.attainment
