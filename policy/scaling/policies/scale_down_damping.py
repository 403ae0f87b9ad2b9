"""How reluctantly a replica is given up: the more so, the more often that was taken back soon after.

A load that stays near what some count takes moves over it and back by chance, again and again. Only there
does this cost anything: by day and by night nothing is taken back before an hour is over.
"""

from __future__ import annotations

import math

import msgspec

# A replica that is asked for again so soon should have stayed.
SOON_S = 600.0
# Parts of a replica that must be to spare, more for each time, up to so many, and how fast that is forgotten.
EACH = 0.2
MOST = 0.6
FADES_S = 1800.0


class ScaleDownDamping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``spare`` parts of a replica are asked for as of ``at``, in a mode with ``count`` replicas.

    The last fall that was not taken back yet was seen at ``fell_at``; 0 where there was none.
    """

    at: float
    mode: str
    count: int
    spare: float = 0.0
    fell_at: float = 0.0


def observe_demand(before: ScaleDownDamping | None, at: float, mode: str, count: int) -> ScaleDownDamping:
    """What is left of the reluctance by ``at``; what a mode has learned is of no use to another."""
    if before is None or before.mode != mode:
        return ScaleDownDamping(at, mode, count)
    spare = before.spare * math.exp(-max(0.0, at - before.at) / FADES_S)
    return ScaleDownDamping(at, mode, count, spare, at if count < before.count else before.fell_at)


def rising(now: ScaleDownDamping) -> ScaleDownDamping:
    """After more are asked for than there are."""
    if not 0.0 <= now.at - now.fell_at < SOON_S:
        return now
    return msgspec.structs.replace(now, spare=min(MOST, now.spare + EACH), fell_at=0.0)
