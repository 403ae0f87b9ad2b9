"""The totals of one model since the start of a gateway worker, as it reports them to the controller."""

from __future__ import annotations

from math import inf
from typing import Any

from policy.config.control import SloConfig
from policy.stats.histogram import BOUNDS, HistogramCounter
from policy.wire.reports import ModelReport

_TOTALS = (
    "arrived", "arrived_tokens", "refused", "ended", "input_tokens", "cached_tokens", "output_tokens",
    "judged", "met_ttft", "met_itl", "met_both",
)  # fmt: skip


class WorkerCounters:
    """The totals of :class:`policy.wire.reports.ModelReport`.

    A stream is judged when it ends, by the current SLO of the model.
    """

    def __init__(self) -> None:
        self._ttft_limit_s = self._itl_limit_s = inf
        self.arrived = self.arrived_tokens = self.refused = self.ended = 0
        self.input_tokens = self.cached_tokens = self.output_tokens = 0
        self.judged = self.met_ttft = self.met_itl = self.met_both = 0
        self.ttft = HistogramCounter(BOUNDS)
        self.itl = HistogramCounter(BOUNDS)
        self.e2e = HistogramCounter(BOUNDS)

    def set_slo(self, slo: SloConfig) -> None:
        """Judge by this SLO from now on."""
        self._ttft_limit_s = inf if slo.ttft_p95_s is None else slo.ttft_p95_s
        self._itl_limit_s = inf if slo.itl_p95_s is None else slo.itl_p95_s

    def arrive(self, prompt_tokens: int) -> None:
        """Count a request with its estimated prompt tokens."""
        self.arrived += 1
        self.arrived_tokens += prompt_tokens

    def end(self, e2e_s: float) -> None:
        """Count a complete answer, ``e2e_s`` seconds after its request arrived."""
        self.ended += 1
        self.e2e.add(e2e_s)

    def count_tokens(self, prompt: int, cached: int, output: int) -> None:
        """Count the tokens of a complete answer: prompt, the cached part of it, and output."""
        self.input_tokens += prompt
        self.cached_tokens += cached
        self.output_tokens += output

    def judge(self, ttft_s: float, gap_s: float) -> None:
        """Judge a complete stream; ``gap_s`` is the mean time between its events, 0 for a single one."""
        if gap_s > 0.0:
            self.itl.add(gap_s)
        self.judged += 1
        if ttft_s <= self._ttft_limit_s:
            self.met_ttft += 1
            if gap_s <= self._itl_limit_s:
                self.met_both += 1
        if gap_s <= self._itl_limit_s:
            self.met_itl += 1

    def report(
        self, *, in_flight: int, queued: int, oldest_s: float, running: tuple[int, int]
    ) -> ModelReport:
        """The totals, with what waits and runs now: ``running`` streams, and their tokens so far."""
        totals: dict[str, Any] = {name: getattr(self, name) for name in _TOTALS}
        totals |= {name: tuple(getattr(self, name).counts) for name in ("ttft", "itl", "e2e")}
        return ModelReport(
            **totals,
            queued=queued,
            oldest_s=oldest_s,
            in_flight=in_flight,
            running=running[0],
            running_tokens=running[1],
        )
