"""What a run is asked to measure, with sizes that a smoke test can make small."""

from __future__ import annotations

from pathlib import Path

import msgspec


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs of a run. ``scale`` multiplies every number of requests; ``cell_s`` is the length of
    one cell of the latency part; ``cores`` are the gateway's and the others'."""

    rounds: int = 5
    scale: float = 1.0
    cell_s: float = 4.0
    prefixes: int = 1000
    soak: int = 1_000_000
    seed: int = 1
    gateway_cores: tuple[int, ...] = (0,)
    other_cores: tuple[int, ...] = (1,)
    out: Path = Path("bench-results")

    def count(self, requests: int) -> int:
        """That many requests at this scale."""
        return max(8, round(requests * self.scale))
