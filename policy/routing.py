"""Which replica takes a request: the least loaded one, relative to what it admits."""

from __future__ import annotations

from collections.abc import Iterable

# Replicas that state no bound are compared by count alone; any positive divisor keeps their order.
UNBOUNDED = 256


def least_loaded(loads: Iterable[tuple[int, int]], draw: float) -> int | None:
    """The index of the least loaded candidate, or ``None`` when all stand at their bound.

    ``loads`` are ``(in_flight, bound)`` pairs, a bound of 0 meaning none stated. Equals are chosen
    between by ``draw`` in [0, 1).
    """
    best: list[int] = []
    least = 0.0
    for i, (in_flight, bound) in enumerate(loads):
        if bound and in_flight >= bound:
            continue
        score = in_flight / (bound or UNBOUNDED)
        if not best or score < least:
            best, least = [i], score
        elif score == least:
            best.append(i)
    return best[int(draw * len(best))] if best else None
