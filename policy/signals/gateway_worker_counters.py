"""The totals of one model since the start of a gateway worker, as it reports them to the controller."""

from __future__ import annotations

from math import inf
from typing import Any, Final

from policy.config.control import ControlConfig, SloConfig
from policy.signals.energy_attribution import OTHERS
from policy.stats.histogram import BOUNDS, HistogramCounter
from policy.types import Priority
from policy.wire.controller_reports import ModelReport, PriorityReport

_TOTALS = (
    "arrived", "arrived_tokens", "refused", "ended", "input_tokens", "cached_tokens", "output_tokens",
    "judged", "met_ttft", "met_itl", "met_both",
)  # fmt: skip
# Adapters of one model that a worker counts by name.
MOST_ADAPTERS: Final = 200


class SloCounters:
    """The limits of an SLO, and the totals of the streams that were judged by it."""

    def __init__(self, slo: SloConfig) -> None:
        self.judged = self.met_ttft = self.met_itl = self.met_both = 0
        self.set_slo(slo)

    def set_slo(self, slo: SloConfig) -> None:
        """Judge by this SLO from now on."""
        self.ttft_s = inf if slo.ttft_p95_s is None else slo.ttft_p95_s
        self.itl_s = inf if slo.itl_p95_s is None else slo.itl_p95_s

    def report(self) -> PriorityReport:
        """The totals."""
        return PriorityReport(
            judged=self.judged, met_ttft=self.met_ttft, met_itl=self.met_itl, met_both=self.met_both
        )


class WorkerCounters:
    """The totals of :class:`policy.wire.controller_reports.ModelReport`.

    A stream is judged when it ends, by the current SLO of the model.
    """

    def __init__(self) -> None:
        self._limit = SloCounters(SloConfig())
        self._by_priority: dict[Priority, SloCounters] = {}
        self._looser: frozenset[Priority] = frozenset()
        self.arrived = self.arrived_tokens = self.refused = self.ended = 0
        self.input_tokens = self.cached_tokens = self.output_tokens = 0
        self.judged = self.met_ttft = self.met_itl = self.met_both = 0
        self.adapter_tokens: dict[str, int] = {}
        self.ttft = HistogramCounter(BOUNDS)
        self.itl = HistogramCounter(BOUNDS)
        self.e2e = HistogramCounter(BOUNDS)

    def set_slo(self, control: ControlConfig) -> None:
        """Judge by its SLOs from now on."""
        self._limit.set_slo(control.slo)
        strictest_s = control.strictest_slo.ttft_p95_s
        own = Priority if control.slo_by_priority or self._by_priority else ()
        for priority in own:
            self._by_priority.setdefault(priority, SloCounters(control.slo)).set_slo(control.slo_of(priority))
        self._looser = frozenset(each for each in own if control.slo_of(each).ttft_p95_s != strictest_s)

    def arrive(self, prompt_tokens: int) -> None:
        """Count a request with its estimated prompt tokens."""
        self.arrived += 1
        self.arrived_tokens += prompt_tokens

    def end(self, e2e_s: float) -> None:
        """Count a complete answer, ``e2e_s`` seconds after its request arrived."""
        self.ended += 1
        self.e2e.add(e2e_s)

    def count_tokens(self, prompt: int, cached: int, output: int, adapter: str = "") -> None:
        """Count the tokens of a complete answer: prompt, the cached part of it, and output."""
        self.input_tokens += prompt
        self.cached_tokens += cached
        self.output_tokens += output
        if adapter:
            counts = self.adapter_tokens
            if adapter not in counts and len(counts) >= MOST_ADAPTERS:
                adapter = OTHERS
            counts[adapter] = counts.get(adapter, 0) + prompt - cached + output

    def first_token(self, ttft_s: float, priority: Priority) -> None:
        """Count a first token, unless its priority has a looser target than others."""
        if priority not in self._looser:
            self.ttft.add(ttft_s)

    def judge(self, ttft_s: float, gap_s: float, priority: Priority) -> None:
        """Judge a complete stream; ``gap_s`` is the mean time between its events, 0 for a single one."""
        if gap_s > 0.0:
            self.itl.add(gap_s)
        limit = self._by_priority[priority] if self._by_priority else self._limit
        on_time, steady = ttft_s <= limit.ttft_s, gap_s <= limit.itl_s
        self.judged += 1
        limit.judged += 1
        if on_time:
            self.met_ttft += 1
            limit.met_ttft += 1
            if steady:
                self.met_both += 1
                limit.met_both += 1
        if steady:
            self.met_itl += 1
            limit.met_itl += 1

    def report(
        self, *, in_flight: int, queued: int, oldest_s: float, running: tuple[int, int], drain_s: float
    ) -> ModelReport:
        """The totals, with what waits and runs now: ``running`` answers, and their tokens so far.

        The last of the running requests is expected to end in ``drain_s`` seconds.
        """
        totals: dict[str, Any] = {name: getattr(self, name) for name in _TOTALS}
        totals |= {name: tuple(getattr(self, name).counts) for name in ("ttft", "itl", "e2e")}
        return ModelReport(
            **totals,
            queued=queued,
            oldest_s=oldest_s,
            in_flight=in_flight,
            running=running[0],
            running_tokens=running[1],
            drain_s=round(drain_s, 3),
            adapter_tokens=self.adapter_tokens.copy(),
            by_priority={priority: judge.report() for priority, judge in self._by_priority.items()},
        )
