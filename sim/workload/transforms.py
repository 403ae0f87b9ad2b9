"""Workloads out of others: a slice, another rate, other lengths, several at once; all of them streams.

The same load, thicker or thinner, and again by another chance: for runs that are alike but for luck.

To scale a trace by its clock (:func:`sim.workload.transforms.scale_rate`) makes its ramps steeper too, and
whoever has to start in time is judged on another load. Here the time axis stays, and there are more requests
or fewer."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterable, Iterator
from math import ceil
from operator import attrgetter

from policy.wire.capture import BLOCK_TOKENS
from sim.arrival import Arrival, Trace

# Hashes and sessions stay within 63 bits, as captures have them.
_MASK = (1 << 63) - 1


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
    """The same requests ``rate`` times as fast, with so many times the tokens, of at least one each.

    Blocks are thinned out or multiplied with the input, so that two prompts share the same part of it as
    before, to within a block.
    """
    for arrival in trace:
        tokens = max(1, round(arrival.input_tokens * input_scale))
        yield arrival._replace(
            at=arrival.at / rate,
            input_tokens=tokens,
            output_tokens=max(1, round(arrival.output_tokens * output_scale)),
            blocks=_stretched(arrival.blocks, input_scale, tokens) if input_scale != 1.0 else arrival.blocks,
        )


def mix(traces: Iterable[Trace]) -> Iterator[Arrival]:
    """All of them in the order of their instants, and where these are the same in the order of ``traces``.

    Sessions and blocks of different traces stay different.
    """
    sources = list(traces)
    apart = [_apart(trace, i, len(sources)) for i, trace in enumerate(sources)]
    return heapq.merge(*apart, key=attrgetter("at"))


def _apart(trace: Trace, number: int, of: int) -> Iterator[Arrival]:
    """``trace`` with sessions and blocks that no other ``number`` below ``of`` has."""
    for arrival in trace:
        yield arrival._replace(
            session=(arrival.session * of + number) & _MASK if arrival.session else 0,
            blocks=tuple((block * of + number) & _MASK for block in arrival.blocks),
        )


def _stretched(blocks: tuple[int, ...], scale: float, input_tokens: int) -> tuple[int, ...]:
    """Hashes of the blocks of a prompt that is ``scale`` times as long: ``input_tokens`` now.

    The new block i ends where ``(i + 1) / scale`` old ones do: it is the same in two prompts where the old
    block that reaches there is.
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


def resample(trace: Trace, factor: float, seed: int, window_s: float = 10.0) -> Iterator[Arrival]:
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
