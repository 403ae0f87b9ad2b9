"""The same load, thicker or thinner, and again by another chance: for runs that are alike but for luck.

To scale a trace by its clock (:func:`sim.workloads.scaled`) makes its ramps steeper too, and whoever has to
start in time is judged on another load. Here the time axis stays, and there are more requests or fewer.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator

from sim.trace import Arrival, Trace


def resampled(trace: Trace, factor: float, seed: int, window_s: float = 10.0) -> Iterator[Arrival]:
    """``factor`` times as many requests as in ``trace`` at any time, moved about within ``window_s`` seconds.

    Each request comes as often as ``factor`` says, by chance where that is no whole number, up to half of
    ``window_s`` sooner or later, and not before 0. The first of them is itself. Each further one has the
    lengths and blocks of one that came within ``window_s`` before it, and belongs to no conversation. Memory
    holds what is within the window. Raises :class:`ValueError` for a factor or window that is not above 0.
    """
    if factor <= 0 or window_s <= 0:
        raise ValueError(f"factor {factor:g} within {window_s:g} s: expected both above 0")
    return _resampled(trace, factor, random.Random(seed), window_s)  # noqa: S311 - reproducible, not secret


def _resampled(trace: Trace, factor: float, rng: random.Random, window_s: float) -> Iterator[Arrival]:
    whole, part = int(factor), factor - int(factor)
    recent: deque[Arrival] = deque()
    # By instant and then by number: two requests at once stay in the order in which they were made.
    ahead: list[tuple[float, int, Arrival]] = []
    made = 0
    for arrival in trace:
        while ahead and ahead[0][0] < arrival.at - window_s / 2:
            yield heapq.heappop(ahead)[2]
        while recent and recent[0].at < arrival.at - window_s:
            recent.popleft()
        recent.append(arrival)
        for copy in range(whole + (rng.random() < part)):
            like = rng.choice(recent)._replace(session=0) if copy else arrival
            at = abs(arrival.at + rng.uniform(-window_s / 2, window_s / 2))
            heapq.heappush(ahead, (at, made, like._replace(at=at)))
            made += 1
    while ahead:
        yield heapq.heappop(ahead)[2]
