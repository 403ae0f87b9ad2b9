"""The metrics of a vLLM server that are read."""

from __future__ import annotations

import re


class VllmMetrics:
    """Reads the metrics with some names, without ``vllm:``, from the text of Prometheus."""

    def __init__(self, *names: str) -> None:
        # Only what is a finite number: a server may write anything, and labels end with their line.
        number = r"([0-9]{1,15}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,2})?)"
        line = rf"^vllm:({'|'.join(names)})(?:\{{[^\n]*\}})? {number}\s"
        self._line = re.compile(line.encode(), re.MULTILINE)

    def read(self, metrics: bytes) -> dict[str, float]:
        """The sums over engines of those that are there."""
        sums: dict[str, float] = {}
        for name, number in self._line.findall(metrics):
            sums[name.decode()] = sums.get(name.decode(), 0.0) + float(number)
        return sums
