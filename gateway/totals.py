"""What the controller is told of one model: totals since this worker started, which only grow."""

from __future__ import annotations

from math import inf

from gateway.tally import Tally
from gateway.usage import Usage
from policy.control import Objective
from policy.histogram import BOUNDS


class Totals:
    """The totals of :class:`policy.reports.ModelReport`, in its words.

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
        self.ttft = Tally(BOUNDS)
        self.itl = Tally(BOUNDS)
        self.e2e = Tally(BOUNDS)

    def promise(self, slo: Objective) -> None:
        """Judge by this objective from now on."""
        self._ttft_limit_s = inf if slo.ttft_p95_s is None else slo.ttft_p95_s
        self._itl_limit_s = inf if slo.itl_p95_s is None else slo.itl_p95_s

    def end(self, e2e_s: float, usage: Usage | None) -> None:
        """An answer was whole, ``e2e_s`` seconds after its request came."""
        self.ended += 1
        self.e2e.add(e2e_s)
        if usage is not None:
            self.count_tokens(usage)

    def count_tokens(self, usage: Usage) -> None:
        """Count what whole answers cost."""
        self.input_tokens += usage.prompt
        self.cached_tokens += usage.cached
        self.output_tokens += usage.completion

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
