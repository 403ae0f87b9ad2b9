"""Requests for adapters by Zipf's law, in calls that arrive by Poisson: the same for the same seed."""

from __future__ import annotations

import random
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request: when it comes, in seconds, for which adapter, and its tokens."""

    at: float
    adapter: int
    prompt_tokens: int
    output_tokens: int


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
    names = list(range(traffic.adapters))
    rng.shuffle(names)
    weights = [(k + 1) ** -traffic.exponent for k in range(traffic.adapters)]
    drawn = iter(rng.choices(names, weights, k=traffic.requests))
    more = 1.0 - 1.0 / traffic.together
    made: list[Arrival] = []
    at, adapter = 0.0, 0
    for _ in range(traffic.requests):
        if not made or rng.random() >= more:
            at += rng.expovariate(traffic.rate / traffic.together)
            adapter = next(drawn)
        prompt, output = (_geometric(rng, mean) for mean in (traffic.prompt_tokens, traffic.output_tokens))
        made.append(Arrival(at, adapter, prompt, output))
    return made


def _geometric(rng: random.Random, mean: int) -> int:
    """At least 1, about ``mean`` on average."""
    return 1 + int(rng.expovariate(1.0 / (mean - 0.5))) if mean > 1 else 1
