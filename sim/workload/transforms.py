"""Transforms of traces, all of them streams: slice, scale, mix and resample.

Scaling the clock (:func:`scale_rate`) also makes ramps steeper. :func:`resample` keeps the time axis and
changes the number of requests, so that start-up times matter as much as before.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator
from math import ceil
from operator import attrgetter

from policy.wire.capture import BLOCK_TOKENS
from sim.arrivals import Arrival, Trace

# Hashes and sessions stay within 63 bits, as captures have them.
_MASK = (1 << 63) - 1
# Within which resampled requests are shifted, and look like one another.
WINDOW_S = 10.0


def slice_trace(trace: Trace, from_s: float, to_s: float | None = None) -> Iterator[Arrival]:
    """The arrivals from ``from_s`` to before ``to_s`` seconds, counted from ``from_s``; reads no further."""
    for arrival in trace:
        if to_s is not None and arrival.at >= to_s:
            return
        if arrival.at >= from_s:
            yield arrival._replace(at=arrival.at - from_s)


def scale_rate(
    trace: Trace, *, rate: float = 1.0, input_scale: float = 1.0, output_scale: float = 1.0
) -> Iterator[Arrival]:
    """The same requests ``rate`` times as fast, with scaled tokens, at least one each.

    Blocks scale with the input, so that two prompts share the same fraction as before, to within a block.
    """
    for arrival in trace:
        tokens = max(1, round(arrival.input_tokens * input_scale))
        yield arrival._replace(
            at=arrival.at / rate,
            think_s=arrival.think_s / rate,
            input_tokens=tokens,
            output_tokens=max(1, round(arrival.output_tokens * output_scale)),
            blocks=_stretched(arrival.blocks, input_scale, tokens) if input_scale != 1.0 else arrival.blocks,
        )


def mix(traces: Iterable[Trace]) -> Iterator[Arrival]:
    """All of them merged by instant; ties keep the order of ``traces``.

    Sessions and blocks of different traces stay different.
    """
    sources = list(traces)
    apart = [_apart(trace, i, len(sources)) for i, trace in enumerate(sources)]
    return heapq.merge(*apart, key=attrgetter("at"))


def _apart(trace: Trace, number: int, of: int) -> Iterator[Arrival]:
    """``trace`` with sessions and blocks that are disjoint for each ``number`` below ``of``."""
    for arrival in trace:
        yield arrival._replace(
            session=(arrival.session * of + number) & _MASK if arrival.session else 0,
            follows=(arrival.follows * of + number) & _MASK if arrival.follows else 0,
            blocks=tuple((block * of + number) & _MASK for block in arrival.blocks),
        )


def _stretched(blocks: tuple[int, ...], scale: float, input_tokens: int) -> tuple[int, ...]:
    """The block hashes of a prompt that is ``scale`` times as long: ``input_tokens`` now.

    New block i ends where ``(i + 1) / scale`` old ones do; two prompts share it where they share the old
    block that reaches there.
    """
    count = min(round(len(blocks) * scale), -(-input_tokens // BLOCK_TOKENS))
    made: list[int] = []
    last, place = -1, 0
    for i in range(count):
        end = min(len(blocks), ceil((i + 1) / scale)) - 1
        # More than one new block may end in an old one: they differ by their place in it.
        last, place = end, place + 1 if end == last else 0
        made.append((blocks[end] * (ceil(scale) + 1) + place) & _MASK)
    return tuple(made)


def resample(trace: Trace, factor: float, seed: int) -> Iterator[Arrival]:
    """``factor`` times the requests of ``trace`` at any time, each shifted within :data:`WINDOW_S`.

    Each request is repeated ``factor`` times (randomly rounded), up to half of :data:`WINDOW_S` earlier or
    later, not before 0. The first copy is the request itself; each further one has the lengths and blocks of
    a request within :data:`WINDOW_S` before it, and no conversation. Memory holds one window.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible, not secret
    whole, part = int(factor), factor - int(factor)
    recent: deque[Arrival] = deque()
    # By instant and then by number: two requests at once stay in the order in which they were made.
    ahead: list[tuple[float, int, Arrival]] = []
    made = 0
    for arrival in trace:
        while ahead and ahead[0][0] < arrival.at - WINDOW_S / 2:
            yield heapq.heappop(ahead)[2]
        while recent and recent[0].at < arrival.at - WINDOW_S:
            recent.popleft()
        recent.append(arrival)
        for copy in range(whole + (rng.random() < part)):
            like = rng.choice(recent)._replace(session=0, follows=0) if copy else arrival
            at = abs(arrival.at + rng.uniform(-WINDOW_S / 2, WINDOW_S / 2))
            heapq.heappush(ahead, (at, made, like._replace(at=at)))
            made += 1
    while ahead:
        yield heapq.heappop(ahead)[2]
