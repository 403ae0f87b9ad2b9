"""The sizes of a run of the benchmark, which a smoke test makes small, and its progress lines."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

_BEGAN = time.monotonic()


class BenchmarkSize(msgspec.Struct, frozen=True, kw_only=True):
    """``scale`` multiplies every number of requests; ``cell_s`` is the duration of a latency cell."""

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


def log(line: str) -> None:
    """Write one line of progress to standard error, with the seconds since the start."""
    sys.stderr.write(f"[{time.monotonic() - _BEGAN:6.0f} s] {line}\n")
    sys.stderr.flush()
