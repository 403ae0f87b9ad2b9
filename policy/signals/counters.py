"""What the controller is told of one model: totals since this worker started, which only grow."""

from __future__ import annotations

from math import inf

from policy.config.control import SloConfig
from policy.stats.histogram import BOUNDS, HistogramCounter
from policy.wire.reports import ModelReport


class WorkerCounters:
    """The totals of :class:`policy.wire.reports.ModelReport`, in its words.

    A stream is judged when it ends, by the objective of the model as it is then.
    """

    __slots__ = (
        "_itl_limit_s", "_ttft_limit_s", "arrived", "cached_tokens", "e2e", "ended", "input_tokens", "itl",
        "judged", "met_both", "met_itl", "met_ttft", "output_tokens", "refused", "ttft",
    )  # fmt: skip

    def __init__(self) -> None:
        self._ttft_limit_s = self._itl_limit_s = inf
        self.arrived = 0
        self.refused = 0
        self.ended = 0
        self.input_tokens = 0
        self.cached_tokens = 0
        self.output_tokens = 0
        self.judged = 0
        self.met_ttft = 0
        self.met_itl = 0
        self.met_both = 0
        self.ttft = HistogramCounter(BOUNDS)
        self.itl = HistogramCounter(BOUNDS)
        self.e2e = HistogramCounter(BOUNDS)

    def promise(self, slo: SloConfig) -> None:
        """Judge by this objective from now on."""
        self._ttft_limit_s = inf if slo.ttft_p95_s is None else slo.ttft_p95_s
        self._itl_limit_s = inf if slo.itl_p95_s is None else slo.itl_p95_s

    def end(self, e2e_s: float) -> None:
        """An answer was whole, ``e2e_s`` seconds after its request came."""
        self.ended += 1
        self.e2e.add(e2e_s)

    def count_tokens(self, prompt: int, cached: int, output: int) -> None:
        """Count what whole answers cost: tokens of prompts, those of them that were cached, and answers."""
        self.input_tokens += prompt
        self.cached_tokens += cached
        self.output_tokens += output

    def judge(self, ttft_s: float, gap_s: float) -> None:
        """A stream ended whole; ``gap_s`` is the mean time between its events, 0 of a single one."""
        if gap_s > 0.0:
            self.itl.add(gap_s)
        self.judged += 1
        if ttft_s <= self._ttft_limit_s:
            self.met_ttft += 1
            if gap_s <= self._itl_limit_s:
                self.met_both += 1
        if gap_s <= self._itl_limit_s:
            self.met_itl += 1

    def report(self, *, in_flight: int, queued: int, oldest_s: float) -> ModelReport:
        """All that was counted until now, and what waits and runs."""
        return ModelReport(
            arrived=self.arrived,
            refused=self.refused,
            ended=self.ended,
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            judged=self.judged,
            met_ttft=self.met_ttft,
            met_itl=self.met_itl,
            met_both=self.met_both,
            ttft=tuple(self.ttft.counts),
            itl=tuple(self.itl.counts),
            e2e=tuple(self.e2e.counts),
            queued=queued,
            oldest_s=oldest_s,
            in_flight=in_flight,
        )
