"""Samples of engine steps, pooled by regions of load (powers of two)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from msgspec.structs import astuple

# Fewer KV tokens than this have no measurable effect on a step.
_FEW_TOKENS = 256.0

_SHORTEST_S = 1e-6

Region = tuple[int, int, int]


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """Means of ``count`` similar steps.

    ``tokens`` scheduled (n), ``kv_tokens`` of context in KV (K), ``running`` requests (R), ``seconds`` (t).
    """

    count: int
    tokens: float
    kv_tokens: float
    running: float
    seconds: float

    def region(self, octaves: int = 1) -> Region:
        """The region of load of these steps; each is ``octaves`` powers of two wide."""
        return (
            _octave(self.tokens) // octaves,
            _octave(self.kv_tokens / _FEW_TOKENS) // octaves,
            _octave(self.running) // octaves,
        )


def pool_steps(samples: Iterable[StepSample], most: int) -> tuple[StepSample, ...]:
    """The same steps in at most ``most`` samples.

    Steps of one region with similar durations are pooled, so stalls stay separate. Regions are widened until
    there are few enough.
    """
    pool = list(samples)
    octaves = 1
    while True:
        found: dict[tuple[Region, int], StepSample] = {}
        for sample in pool:
            key = (sample.region(octaves), _octave(sample.seconds / _SHORTEST_S) // octaves)
            before = found.get(key)
            found[key] = sample if before is None else _together(before, sample)
        if len(found) <= most:
            return tuple(found[key] for key in sorted(found))
        pool, octaves = list(found.values()), octaves * 2


def _octave(value: float) -> int:
    return math.floor(math.log2(value)) + 1 if value >= 1.0 else 0


def _together(one: StepSample, other: StepSample) -> StepSample:
    count = one.count + other.count
    part = other.count / count
    means = zip(astuple(one)[1:], astuple(other)[1:], strict=True)
    return StepSample(count, *(first + part * (second - first) for first, second in means))
