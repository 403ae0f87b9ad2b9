"""Counts and levels as they are published: all of one registry, and named alike."""

from __future__ import annotations

from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge


class Declared:
    """Declares metrics named ``tidegate_NAME`` in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """Something that only grows, added over all workers."""
        return Counter(f"tidegate_{name}", text, labels, registry=self._registry)

    def gauge(
        self, name: str, text: str, *labels: str, over: Literal["livesum", "livemin", "livemax"] = "livesum"
    ) -> Gauge:
        """Something that is at a level now; ``over`` says what is made of those of the live workers."""
        return Gauge(f"tidegate_{name}", text, labels, registry=self._registry, multiprocess_mode=over)
