"""Distributions of generated workloads: token lengths, and adapter popularity by Zipf's law."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable
from itertools import accumulate
from statistics import NormalDist
from typing import Annotated

from msgspec import Meta

from policy.config.control import Fraction, Section
from policy.errors import ConfigError
from policy.wire.capture import MAX_TOKENS, Tokens


def zipf_weights(count: int, exponent: float) -> list[float]:
    """The weight of each of ``count`` items by Zipf's law, the most popular first; exponent 0 is uniform."""
    return [(k + 1) ** -exponent for k in range(count)]


def geometric(rng: random.Random, mean: float) -> int:
    """A geometric sample, at least 1, with about ``mean``."""
    return 1 + int(rng.expovariate(1.0 / (mean - 0.5))) if mean > 1 else 1


class AdapterPopularity(Section, frozen=True):
    """Adapters by Zipf's law: the k-th has weight ``k ** -exponent``.

    They are ``names``, or ``count`` adapters named ``adapter-1`` and so on. ``share`` is the fraction of
    requests for an adapter; the others are for the base model.
    """

    names: tuple[str, ...] = ()
    count: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    exponent: Annotated[float, Meta(ge=0, le=10)] = 1.0
    share: Fraction = 1.0


def sample_adapter(popularity: AdapterPopularity | None, rng: random.Random) -> Callable[[], str]:
    """A function that draws the adapter of each request; empty for the base model."""
    if popularity is None:
        return lambda: ""
    names = popularity.names or [f"adapter-{k + 1}" for k in range(popularity.count)]
    weights = list(accumulate(zipf_weights(len(names), popularity.exponent)))

    def choose() -> str:
        if rng.random() >= popularity.share:
            return ""
        return rng.choices(names, cum_weights=weights)[0]

    return choose


# Standard deviations from the median to the 99th percentile.
_Z99 = NormalDist().inv_cdf(0.99)
# Lengths sampled from a trace: enough for the 99th percentile to within a few percent.
_SAMPLE = 65_536


class LengthDistribution(Section, frozen=True):
    """Lognormal with median ``p50`` and ``p99``, or sampled from the trace at a path.

    No length exceeds ``max``.
    """

    p50: Tokens | None = None
    p99: Tokens | None = None
    trace: str = ""
    max: Tokens = MAX_TOKENS


Length = Tokens | LengthDistribution


def check_length(path: str, length: Length) -> None:
    """Raises :class:`policy.errors.ConfigError` for a contradictory length."""
    if isinstance(length, int):
        return
    given = [each is not None for each in (length.p50, length.p99)]
    if any(given) if length.trace else not all(given):
        raise ConfigError(path, None, "a count of tokens, or p50 and p99, or trace")
    if length.p50 is not None and length.p99 is not None and length.p99 < length.p50:
        raise ConfigError(f"{path}.p99", length.p99, f"at least p50 = {length.p50}")


def sample_length(
    length: Length, rng: random.Random, of_trace: Callable[[str], Iterable[int]]
) -> Callable[[], int]:
    """A function that draws lengths; ``of_trace`` reads those of the trace at a path."""
    if isinstance(length, int):
        return lambda: length
    if length.trace:
        sample = _sampled(of_trace(length.trace), rng)
        return lambda: min(length.max, rng.choice(sample))
    assert length.p50 is not None and length.p99 is not None
    draw = lognormal(rng, length.p50, length.p99)
    return lambda: min(length.max, max(1, round(draw())))


def lognormal(rng: random.Random, p50: float, p99: float) -> Callable[[], float]:
    """A function that draws from the lognormal distribution with this median and 99th percentile."""
    mu, sigma = math.log(p50), math.log(p99 / p50) / _Z99
    return lambda: rng.lognormvariate(mu, sigma)


def _sampled(values: Iterable[int], rng: random.Random) -> array[int]:
    """A uniform sample of at most :data:`_SAMPLE` values (Vitter's algorithm R)."""
    kept = array("q")
    for i, value in enumerate(values):
        if i < _SAMPLE:
            kept.append(value)
        elif (place := rng.randrange(i + 1)) < _SAMPLE:
            kept[place] = value
    return kept
