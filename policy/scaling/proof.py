"""What replicas take together, as they show: the rate that each was given over the KV cache that it filled.

The engine model knows one replica, and requests of one length. Many share what comes, so that a burst finds
room somewhere, and each mix of lengths fills caches in its own way. While requests are well within the
objective, the rate at which the caches would be as full as they may be is what a replica takes.
"""

from __future__ import annotations

import math

import msgspec

from policy.scaling.counting import sane
from policy.scaling.view import View

# The means are of so long: longer than answers take, shorter than a load of another kind.
MEAN_S = 180.0
# No further beyond what was given is concluded from it.
FURTHER = 2.0
# Of what was given when latencies were not, this much was not too much.
BACK = 0.9
# Within the objective by so much a latency says that there is room.
ROOM = 0.75
# Less than this of a cache in use says nothing.
_LEAST_USED = 0.02


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As of ``at`` a replica of a mode was given ``rate`` requests per second and filled ``used`` of its KV.

    Both are means over the past while, which began at ``since``. ``late`` says that latencies are near the
    objective, or beyond it.
    """

    at: float
    mode: str
    since: float
    rate: float = 0.0
    used: float = 0.0
    late: bool = False


def proved(before: Proof | None, view: View) -> Proof:
    """What is known after this view; of another mode nothing, and no more without figures of replicas."""
    if before is None or before.mode != view.mode:
        before = Proof(view.at, view.mode, view.at)
    demand, figures = view.signals.demand, view.signals.replicas
    if demand is None or not figures:
        return before
    rate = sane(demand.arrivals.last_20_s) / len(figures)
    used = sum(min(sane(each.kv_used), 1.0) for each in figures) / len(figures)
    elapsed_s = max(0.0, view.at - before.at)
    # While they are young they are means of all that was seen.
    age_s = max(elapsed_s, min(MEAN_S, view.at - before.since))
    part = -math.expm1(-elapsed_s / age_s) if before.used and age_s > 0 else 1.0
    return Proof(
        at=view.at,
        mode=view.mode,
        since=before.since,
        rate=before.rate + part * (rate - before.rate),
        used=before.used + part * (used - before.used),
        late=_late(view),
    )


def sustained(proof: Proof | None, view: View, alone: float, full: float) -> float:
    """The requests per second of one replica, of which one ``alone`` takes so many by the model.

    No less than that, and no more than ``full`` (0..1) of what it keeps up with by the model or than fill
    its cache to that part: sharing makes up for chance, and not for what is missing.
    """
    if proof is None or proof.mode != view.mode or proof.used < _LEAST_USED:
        return alone
    further = BACK if proof.late else FURTHER
    room = min(proof.rate * full / proof.used, further * proof.rate)
    return max(alone, min(room, full * sane(view.capability.mu_max)))


def _late(view: View) -> bool:
    demand, slo = view.signals.demand, view.slo
    assert demand is not None
    pairs = ((demand.ttft, slo.ttft_p95_s), (demand.itl, slo.itl_p95_s))
    near = any(told.p95 > ROOM * limit for told, limit in pairs if told and told.count and limit is not None)
    return near or demand.met.both < slo.attainment
