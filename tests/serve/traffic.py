"""Reports of a gateway, and a policy that scales by them, for timelines of the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policy.stats.histogram import BUCKETS, bucket_of
from policy.wire.controller_reports import GatewayReport, ModelReport
from tests.serve.plane import Plane

# One replica for each request per second; counts its calls.
BY_RATE = """
from policy.scaling.view import Proposal

class ByRate:
    def __init__(self, each=1.0):
        self.each = each

    def decide(self, view, memory):
        seen = (memory or 0) + 1
        demand = view.signals.demand
        rate = demand.arrivals.last_6_s if demand is not None else 0.0
        count = min(max(round(rate / self.each), view.least), view.most)
        if demand is None:
            count = view.count
        return Proposal(count=count, reason=f"{rate:.1f}/s", terms={"rate": rate}, forecast=rate, memory=seen)
"""


def by_rate(folder: Path, **parameters: Any) -> dict[str, Any]:
    """The choice of that policy, written to ``folder``."""
    file = folder / "by_rate.py"
    if not file.exists():
        file.write_text(BY_RATE)
    return {"custom": {"class": f"{file}:ByRate", **parameters}}


class Traffic:
    """One gateway worker with a steady rate for each model, which reports once a second."""

    def __init__(self, plane: Plane) -> None:
        self.plane = plane
        self.rates: dict[str, float] = {}
        self.queued: dict[str, int] = {}
        self.ttft_s = 0.2
        self.met = 1.0
        self._totals: dict[str, dict[str, float]] = {}
        self._number = 0
        self._began = self._reported = plane.now
        self.silent = False

    @classmethod
    async def over(cls, plane: Plane, written: dict[str, Any], seconds: float, **rates: float) -> Traffic:
        """Start a controller with the document ``written``, and let time pass with these rates."""
        await plane.up(written)
        traffic = cls(plane)
        await traffic.run(seconds, **rates)
        return traffic

    def report(self) -> None:
        """Report the requests since the last report."""
        self._number += 1
        now = self.plane.now
        seconds, self._reported = now - self._reported, now
        models = {}
        for name in {*self.rates, *self.queued}:
            totals = self._totals.setdefault(name, {"arrived": 0.0, "met": 0.0})
            totals["arrived"] += self.rates.get(name, 0.0) * seconds
            totals["met"] += self.rates.get(name, 0.0) * seconds * self.met
            models[name] = self._model(name, int(totals["arrived"]), int(totals["met"]))
        if not self.silent:
            self.plane.controller.signals(
                GatewayReport(worker="w", number=self._number, since_s=now - self._began, models=models)
            )

    def _model(self, name: str, arrived: int, met: int) -> ModelReport:
        histogram = [0] * BUCKETS
        histogram[bucket_of(self.ttft_s)] = arrived
        return ModelReport(
            arrived=arrived,
            ended=arrived,
            input_tokens=200 * arrived,
            output_tokens=50 * arrived,
            judged=arrived,
            met_ttft=met,
            met_itl=met,
            met_both=met,
            ttft=tuple(histogram),
            itl=tuple(histogram),
            queued=self.queued.get(name, 0),
            oldest_s=1.0 if self.queued.get(name) else 0.0,
            in_flight=round(self.rates.get(name, 0.0)),
        )

    async def run(self, seconds: float, **rates: float) -> None:
        """Let time pass with so many requests per second of each model."""
        self.rates |= rates
        for tick in range(round(seconds * 2)):
            if tick % 2 == 0:
                self.report()
            self.plane.now += 0.3
            await self.plane.ticks(1)
