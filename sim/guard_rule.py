"""A guard's rule of its slots in virtual time, and the counts of requests that it and a plan go by."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

# HALF_LIFE_S of serve/demand.py and serve/engine/slots.py: so long halves a count.
HALF_LIFE_S = 60.0


class Counts:
    """Ageing counts of requests by adapter; each call is given the instant, in seconds."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def add(self, adapter: str, at: float, count: int = 1) -> None:
        """So many more requests for ``adapter``."""
        self._counts[adapter] = (self.of(adapter, at) + count, at)

    def of(self, adapter: str, at: float) -> float:
        """All requests for ``adapter``, each halved every :data:`HALF_LIFE_S`."""
        total, since = self._counts.get(adapter, (0.0, at))
        return total * math.exp((since - at) * math.log(2) / HALF_LIFE_S)

    def rate(self, adapter: str, at: float) -> float:
        """Requests per second."""
        return self.of(adapter, at) * math.log(2) / HALF_LIFE_S


class GuardRule:
    """serve/engine/slots.py: what is held stays longest, then what would cost most to load again.

    A load costs the same for all here. What is held and not loaded is loaded ahead of requests, for what is
    not held and asked for less, or less than once in a minute. ``news`` are the requests since a beat took
    them.
    """

    shares = True

    def __init__(self) -> None:
        self.news: Counter[str] = Counter()
        self._held: dict[str, int] = {}
        self._counts = Counts()

    def hold(self, adapters: Sequence[str]) -> None:
        """Keep these before others, the first most of all."""
        self._held = {adapter: rank for rank, adapter in enumerate(adapters)}

    def asked(self, adapter: str, at: float) -> None:
        self.news[adapter] += 1
        self._counts.add(adapter, at)

    def victim(self, idle: Sequence[str], at: float) -> str:
        def worth(adapter: str) -> tuple[int, float]:
            rank = self._held.get(adapter)
            return (0 if rank is None else len(self._held) - rank), self._counts.of(adapter, at)

        return min(idle, key=worth)

    def ahead(self, loaded: Collection[str], idle: Sequence[str], free: bool, at: float) -> str | None:
        adapter = next((held for held in self._held if held not in loaded), None)
        if adapter is None or free:
            return adapter
        least = max(self._counts.of(adapter, at), 0.5)
        gives = any(each not in self._held and self._counts.of(each, at) < least for each in idle)
        return adapter if gives else None
