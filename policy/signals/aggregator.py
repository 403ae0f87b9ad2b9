"""What gateways and replicas told, gathered into the signals that decisions read.

Gateways tell totals, so that a report which is lost is made good by the next: what counts is the difference
of two, spread evenly over the time between them. Nothing here reads a clock; all instants are seconds of
the controller's own, which never goes back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policy.signals.replica_metrics import ReplicaMetrics
from policy.signals.types import Demand, LatencyQuantiles, Rates, Shares, Signals
from policy.stats.histogram import BUCKETS, quantile
from policy.stats.windows import Count, RateBins
from policy.wire.heartbeat import Heartbeat
from policy.wire.reports import GatewayReport, ModelReport

# A worker that is silent for so long, while others speak, counts no more.
SILENT_S = 10.0
# What a worker counted before it was first heard is counted if it is no older than this. Of an older one the
# controller that was restarted has known it all, and the mean rate of an hour says nothing of this minute.
YOUNG_S = 60.0
# Its totals are kept for so long: one that comes back goes on where it was.
KEPT_S = 600.0
# No rate is a mean over less: the first request after a start is no burst.
LEAST_S = 3.0
# What requests are like is said by the latest of them that are so many, of a minute at least and ten at most.
# Where lengths vary by their mean, three hundred say it to 6 %; who listens for ten minutes always learns of
# another load when it is over.
LATEST_S = 60.0
LONGEST_S = 600.0
ENOUGH = 300

_ARRIVED, _REFUSED, _LEVEL, _ENDED, _INPUT, _CACHED, _OUTPUT = range(7)
_RATES = (
    (_ARRIVED, "arrived"), (_REFUSED, "refused"), (_ENDED, "ended"), (_INPUT, "input_tokens"),
    (_CACHED, "cached_tokens"), (_OUTPUT, "output_tokens"),
)  # fmt: skip
_JUDGED = tuple(enumerate(("judged", "met_ttft", "met_itl", "met_both")))
_HISTOGRAMS = len(_JUDGED)
_DURATIONS = tuple(_HISTOGRAMS + i * BUCKETS for i in range(3))
_NOTHING = ModelReport()


class _Worker:
    """A gateway worker: its last totals by model, and those that it named in its last report.

    ``heard_at`` is up to when it told all, ``told_from`` since when: ``None`` is since ever.
    """

    __slots__ = ("heard_at", "left", "models", "named", "number", "told_from")

    def __init__(self, heard_at: float, told_from: float | None, models: dict[str, ModelReport]) -> None:
        self.heard_at = heard_at
        self.told_from = told_from
        self.number = -1
        self.left = False
        self.models = models
        self.named = frozenset(models)


class _Model:
    """What all workers counted of one model: ten minutes of rates, a minute of durations."""

    __slots__ = ("asked_at", "minute", "rates", "told_at")

    def __init__(self, at: float) -> None:
        self.rates = RateBins(600, 7)
        self.minute = RateBins(60, _HISTOGRAMS + 3 * BUCKETS)
        self.told_at = self.asked_at = at

    def count(self, was: ModelReport, now: ModelReport, level: float, begin: float, at: float) -> None:
        """One worker's totals went from ``was`` to ``now``, and its mean level was ``level`` meanwhile."""
        rates: list[Count] = [(_LEVEL, level * (at - begin))]
        rates += _grown(_RATES, was, now)
        self.rates.spread(begin, at, rates)
        durations = [*_grown(_JUDGED, was, now)]
        for kind, before, after in zip(_DURATIONS, _histograms(was), _histograms(now), strict=True):
            durations += _placed(kind, before, after)
        if durations:
            self.minute.spread(begin, at, durations)
        if now.arrived > was.arrived or now.in_flight:
            self.asked_at = at
        self.told_at = at


class SignalAggregator:
    """All that one controller was told since it started."""

    def __init__(self) -> None:
        self._presence = ReplicaMetrics()
        self._workers: dict[str, _Worker] = {}
        self._models: dict[str, _Model] = {}
        self._began: float | None = None

    def take(self, report: GatewayReport, at: float) -> None:
        """A gateway worker tells its totals; a report that a later one overtook is passed over."""
        worker = self._workers.get(report.worker)
        if worker is None:
            worker = self._join(report, at)
        elif report.number <= worker.number:
            return
        begin = worker.heard_at
        for name, now in report.models.items():
            was = worker.models.get(name, _NOTHING)
            level = (was.in_flight if name in worker.named else 0) + now.in_flight
            model = self._models.get(name)
            if model is None:
                model = self._models[name] = _Model(at)
            model.count(was, now, level / 2, begin, at)
        worker.models.update(report.models)
        worker.named = frozenset(report.models)
        worker.number, worker.heard_at, worker.left = report.number, at, report.last

    def take_beat(self, beat: Heartbeat, at: float) -> None:
        """A replica tells how it is."""
        self._presence.take(beat, at)

    def signals(self, model: str, at: float) -> Signals:
        """What is known of ``model``."""
        return Signals(demand=self._demand(model, at), replicas=self._presence.figures(model, at))

    def _join(self, report: GatewayReport, at: float) -> _Worker:
        """A worker that was never heard, or not for long."""
        self._forget(at)
        young = report.since_s <= YOUNG_S
        began = at - report.since_s if young else at
        worker = _Worker(began, None if young else at, {} if young else dict(report.models))
        self._workers[report.worker] = worker
        self._began = began if self._began is None else min(self._began, began)
        return worker

    def _forget(self, at: float) -> None:
        """Drop workers that were silent for long, and models that nobody has named since."""
        self._workers = {n: worker for n, worker in self._workers.items() if worker.heard_at >= at - KEPT_S}
        self._models = {n: model for n, model in self._models.items() if model.told_at >= at - KEPT_S}

    def _demand(self, name: str, at: float) -> Demand | None:
        """As of the last report that named the model: what nobody tells any more does not fade to nothing."""
        model = self._models.get(name)
        if model is None:
            return None
        end = model.told_at
        tellers = [
            worker
            for worker in self._workers.values()
            if name in worker.named and not worker.left and worker.heard_at >= end - SILENT_S
        ]
        last = [worker.models[name] for worker in tellers]
        arrivals, refused, concurrency = self._rates(model, tellers, sum(one.in_flight for one in last))
        minute = model.minute.sums(end - 60.0, end)
        ttft, itl, e2e = (_quantiles(minute[kind : kind + BUCKETS]) for kind in _DURATIONS)
        like_s = model.rates.latest_s(end, _ENDED, ENOUGH, LATEST_S, LONGEST_S)
        of_ended = model.rates.sums(end - like_s, end)
        ended = of_ended[_ENDED]
        return Demand(
            age_s=at - min((worker.heard_at for worker in tellers), default=end),
            arrivals=arrivals,
            refused=refused,
            concurrency=concurrency,
            queued=sum(one.queued for one in last),
            oldest_s=max((one.oldest_s for one in last), default=0.0),
            ttft=ttft,
            itl=itl,
            e2e=e2e,
            met=_shares(*minute[:_HISTOGRAMS]),
            input_tokens=of_ended[_INPUT] / ended if ended else 0.0,
            output_tokens=of_ended[_OUTPUT] / ended if ended else 0.0,
            hit=min(1.0, of_ended[_CACHED] / of_ended[_INPUT]) if of_ended[_INPUT] else 0.0,
            idle_s=end - model.asked_at,
        )

    def _rates(self, model: _Model, tellers: Sequence[_Worker], level: int) -> Iterator[Rates]:
        """Arrivals, refusals and concurrency, which is ``level`` at this moment."""
        means = [self._means(model, tellers, seconds, level) for seconds in (6.0, 20.0, 60.0, 600.0)]
        for six, twenty, sixty, long in zip(*means, strict=True):
            yield Rates(last_6_s=six, last_20_s=twenty, last_60_s=sixty, last_600_s=long)

    def _means(
        self, model: _Model, tellers: Sequence[_Worker], seconds: float, level: int
    ) -> tuple[float, float, float]:
        end = model.told_at
        sums = model.rates.sums(end - seconds, end)
        told_s = max(1.0, self._told_s(tellers, seconds, end, LEAST_S))
        # A level needs no time to be one.
        level_s = self._told_s(tellers, seconds, end, 0.0)
        concurrency = sums[_LEVEL] / level_s if level_s >= 1.0 else float(level)
        return sums[_ARRIVED] / told_s, sums[_REFUSED] / told_s, concurrency

    def _told_s(self, tellers: Sequence[_Worker], seconds: float, end: float, least_s: float) -> float:
        """Of how many of the ``seconds`` before ``end`` workers told, as a mean over them.

        They tell at different moments, and one that died says nothing of its last seconds: who is silent is
        taken to do as the others. Nothing is known of before the first of all reports.
        """
        began = min(end if self._began is None else self._began, end - least_s)
        first = max(end - seconds, began)
        if not tellers:
            return end - first
        told_s = 0.0
        for worker in tellers:
            own = first if worker.told_from is None else max(first, min(worker.told_from, end - least_s))
            told_s += max(0.0, worker.heard_at - own)
        return told_s / len(tellers)


def _grown(kinds: Sequence[tuple[int, str]], was: ModelReport, now: ModelReport) -> Iterator[Count]:
    """By how much each of these totals grew."""
    for kind, name in kinds:
        if (more := getattr(now, name) - getattr(was, name)) > 0:
            yield kind, more


def _histograms(report: ModelReport) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    return report.ttft, report.itl, report.e2e


def _placed(kind: int, was: Sequence[int], now: Sequence[int]) -> Iterator[Count]:
    """By how much each bucket of a histogram grew, whose first one is of this kind."""
    if now != was:
        # Of another version's buckets nothing can be made.
        if len(now) != len(was):
            return
        for place, (before, after) in enumerate(zip(was, now, strict=True)):
            if after > before:
                yield kind + place, after - before


def _quantiles(counts: Sequence[float]) -> LatencyQuantiles | None:
    p50, p90, p95, p99 = (quantile(counts, part) for part in (0.5, 0.9, 0.95, 0.99))
    if p50 is None or p90 is None or p95 is None or p99 is None:
        return None
    return LatencyQuantiles(count=round(sum(counts)), p50=p50, p90=p90, p95=p95, p99=p99)


def _shares(judged: float, ttft: float, itl: float, both: float) -> Shares:
    if not judged:
        return Shares()
    return Shares(ttft=ttft / judged, itl=itl / judged, both=both / judged)
