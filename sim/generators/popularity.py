"""Which adapter a request is for: a few are asked for often, most seldom."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from typing import Annotated

from msgspec import Meta

from policy.errors import ConfigError
from policy.section import Fraction, Section
from sim.arrivals import zipf_weights


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


def chosen(popularity: Popularity | None, rng: random.Random) -> Callable[[], str]:
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
