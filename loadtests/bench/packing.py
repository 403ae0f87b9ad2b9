"""The least possible: how few homes a draw of prefixes needs so that load stays even. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def least_pairs(drawn: Sequence[int], replicas: int, bound: float, room: int) -> int:
    """The fewest (prefix, replica) pairs by which no replica has more than ``bound`` times the mean.

    ``room`` is how many prefixes a replica caches. The largest is packed first, where there is least, and
    what exceeds the bound there is cut off and packed like the others. That is the least if nothing is cut
    but what has more requests than a replica may, and a few too many at worst. 0 if they do not all fit.
    """
    most = bound * len(drawn) / replicas
    loads, homes = [0.0] * replicas, [0] * replicas
    rest = sorted(map(float, Counter(drawn).values()))
    while rest:
        part = rest.pop()
        free = [i for i in range(replicas) if homes[i] < room and loads[i] < most]
        if not free:
            return 0
        i = min(free, key=lambda i: loads[i])
        taken = min(part, most - loads[i])
        loads[i] += taken
        homes[i] += 1
        if part - taken > 1e-9:
            rest.append(part - taken)
            rest.sort()
    return sum(homes)
