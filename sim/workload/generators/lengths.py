"""How many tokens a request has: always as many, lognormal, or drawn from a trace."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterable
from statistics import NormalDist

from policy.config.control import Section
from policy.errors import ConfigError
from policy.wire.capture import MAX_TOKENS, Tokens

# Standard deviations from the median to the 99th percentile.
_Z99 = NormalDist().inv_cdf(0.99)
# So many lengths of a trace stand for all of them: the 99th percentile is known to a few parts in a hundred.
_SAMPLE = 65_536


class Lengths(Section, frozen=True):
    """Lognormal with a median of ``p50`` and ``p99``, or lengths of the ``trace`` at this path.

    No length is over ``max``.
    """

    p50: Tokens | None = None
    p99: Tokens | None = None
    trace: str = ""
    max: Tokens = MAX_TOKENS


Length = Tokens | Lengths


def check_length(path: str, length: Length) -> None:
    """Refuse what is neither; raises :class:`policy.errors.ConfigError`."""
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
    """What draws one length after another; ``of_trace`` reads those of the trace at a path."""
    if isinstance(length, int):
        return lambda: length
    if length.trace:
        sample = _sampled(of_trace(length.trace), rng)
        return lambda: min(length.max, rng.choice(sample))
    assert length.p50 is not None and length.p99 is not None
    mu, sigma = math.log(length.p50), math.log(length.p99 / length.p50) / _Z99
    return lambda: min(length.max, max(1, round(rng.lognormvariate(mu, sigma))))


def _sampled(values: Iterable[int], rng: random.Random) -> array[int]:
    """At most so many of ``values``, each as likely as any other (Vitter's algorithm R)."""
    kept = array("q")
    for i, value in enumerate(values):
        if i < _SAMPLE:
            kept.append(value)
        elif (place := rng.randrange(i + 1)) < _SAMPLE:
            kept[place] = value
    return kept
