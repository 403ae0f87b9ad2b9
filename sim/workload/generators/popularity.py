"""Requests for adapters by Zipf's law, in calls that arrive by Poisson: the same for the same seed.

Which adapter a request is for: a few are asked for often, most seldom."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Annotated, NamedTuple

from msgspec import Meta

from policy.config.control import Fraction, Section
from policy.errors import ConfigError
from sim.arrival import Arrival


class Traffic(NamedTuple):
    """What is asked for: the k-th of ``adapters`` with weight ``k ** -exponent``, ``rate`` requests a second.

    They come in calls of ``together`` requests for one adapter on average, at once: several choices, prompts
    or tools of one client. ``prompt_tokens``, ``output_tokens`` and ``together`` are means of geometric
    distributions.
    """

    adapters: int
    exponent: float
    rate: float
    requests: int
    together: float
    prompt_tokens: int
    output_tokens: int
    seed: int


def arrivals(traffic: Traffic) -> list[Arrival]:
    """The requests in the order of their arrival; which adapters are popular is drawn, too."""
    rng = random.Random(f"arrivals {traffic.seed}")  # noqa: S311 - a reproducible workload
    names = [str(number) for number in range(traffic.adapters)]
    rng.shuffle(names)
    weights = zipf_weights(traffic.adapters, traffic.exponent)
    drawn = iter(rng.choices(names, weights, k=traffic.requests))
    more = 1.0 - 1.0 / traffic.together
    made: list[Arrival] = []
    at, adapter = 0.0, ""
    for _ in range(traffic.requests):
        if not made or rng.random() >= more:
            at += rng.expovariate(traffic.rate / traffic.together)
            adapter = next(drawn)
        prompt, output = (geometric(rng, mean) for mean in (traffic.prompt_tokens, traffic.output_tokens))
        made.append(Arrival(at, prompt, output, adapter=adapter))
    return made


def zipf_weights(count: int, exponent: float) -> list[float]:
    """How often each of ``count`` is asked for, the most popular first, by Zipf's law; 0 for all alike."""
    return [(k + 1) ** -exponent for k in range(count)]


def geometric(rng: random.Random, mean: float) -> int:
    """At least 1, about ``mean`` on average."""
    return 1 + int(rng.expovariate(1.0 / (mean - 0.5))) if mean > 1 else 1


class Popularity(Section, frozen=True):
    """Adapters by Zipf's law: the k-th is asked for ``k ** -exponent`` times as often as the first.

    They are ``names``, or ``count`` of them called ``adapter-1`` and so on. ``share`` of the requests are for
    an adapter, the others for the base model.
    """

    names: tuple[str, ...] = ()
    count: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    exponent: Annotated[float, Meta(ge=0, le=10)] = 1.0
    share: Fraction = 1.0


def check_popularity(path: str, popularity: Popularity) -> None:
    """Refuse one that says not which; raises :class:`policy.errors.ConfigError`."""
    if bool(popularity.names) == bool(popularity.count):
        raise ConfigError(f"{path}.count", popularity.count, "count of at least 1 or names, one of them")


def sample_adapter(popularity: Popularity | None, rng: random.Random) -> Callable[[], str]:
    """What draws the adapter of one request after another; empty for none."""
    if popularity is None:
        return lambda: ""
    names = popularity.names or [f"adapter-{k + 1}" for k in range(popularity.count)]
    weights = list(accumulate(zipf_weights(len(names), popularity.exponent)))

    def choose() -> str:
        if rng.random() >= popularity.share:
            return ""
        return rng.choices(names, cum_weights=weights)[0]

    return choose
