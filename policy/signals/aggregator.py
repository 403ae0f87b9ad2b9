"""Aggregates the reports of gateways and replicas into the signals that decisions read.

Gateways report totals, so that a lost report does no harm: the difference of two is spread evenly over the
time between them. All instants are arguments, in seconds of the controller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from policy.request import ASSUMED_INPUT_TOKENS, ASSUMED_OUTPUT_TOKENS, ASSUMED_REQUESTS
from policy.signals.energy_attribution import BASE, EnergyAttribution
from policy.signals.heartbeat_metrics import ReplicaMetrics
from policy.signals.types import LatencyQuantiles, ModelDemand, PriorityShares, Rates, Shares, Signals
from policy.stats.histogram import BUCKETS, quantile
from policy.stats.windows import Count, RateBins
from policy.types import Priority, ReplicaPhase
from policy.wire.controller_reports import EngineReport, GatewayReport, GpuReport, ModelReport, PriorityReport
from policy.wire.heartbeat import Heartbeat

# A worker without a report for this long, while others report, is not counted.
SILENT_S = 10.0
# The totals in the first report of a worker count if it started at most this long ago; those of an older one
# were known to the controller before its restart.
YOUNG_S = 60.0
# The totals of a silent worker are kept for this long.
KEPT_S = 600.0
# The shortest time for a rate: the first request after a start is no burst.
LEAST_S = 3.0
# Mean lengths are of the last 300 requests, within one to ten minutes: if lengths vary by their mean, the
# error is 6 %, and a change of the load is seen in time.
LATEST_S = 60.0
LONGEST_S = 600.0
ENOUGH = 300
# What arrives and runs corrects the mean lengths of those that ended where it exceeds them by this factor:
# less is chance.
NOTICEABLE = 1.25

_ARRIVED, _REFUSED, _LEVEL, _ENDED, _INPUT, _CACHED, _OUTPUT, _ASKED, _PRODUCED = range(9)
_RATES = (
    (_ARRIVED, "arrived"), (_REFUSED, "refused"), (_ENDED, "ended"), (_INPUT, "input_tokens"),
    (_CACHED, "cached_tokens"), (_OUTPUT, "output_tokens"), (_ASKED, "arrived_tokens"),
)  # fmt: skip
_JUDGED = tuple(enumerate(("judged", "met_ttft", "met_itl", "met_both")))
_DURATIONS = tuple((len(_JUDGED) + i * BUCKETS, name) for i, name in enumerate(("ttft", "itl", "e2e")))
_NOTHING = ModelReport()
_NONE_JUDGED = PriorityReport()


@dataclass(slots=True)
class _Worker:
    """A gateway worker: its last totals by model, and the models ``named`` in its last report.

    Its totals cover the time from ``reported_from`` (``None``: from its start) to ``reported_at``.
    """

    reported_at: float
    reported_from: float | None
    models: dict[str, ModelReport]
    named: Collection[str]
    number: int = -1
    left: bool = False


class _Model:
    """The counts of one model by all workers: ten minutes of rates, a minute of durations."""

    __slots__ = ("by_priority", "demand_at", "last_at", "minute", "rates")

    def __init__(self, at: float) -> None:
        self.rates = RateBins(600, 9)
        self.minute = RateBins(60, len(_JUDGED) + len(_DURATIONS) * BUCKETS)
        self.by_priority: dict[Priority, RateBins] = {}
        self.last_at = self.demand_at = at

    def count(self, was: ModelReport, now: ModelReport, level: float, begin: float, at: float) -> None:
        """Add a worker's change from ``was`` to ``now``, with its mean concurrency ``level`` meanwhile."""
        produced = now.output_tokens + now.running_tokens - was.output_tokens - was.running_tokens
        rates: list[Count] = [(_LEVEL, level * (at - begin)), *_growth(_RATES, was, now)]
        if produced > 0:  # streams that were cut have produced less than was counted of them
            rates.append((_PRODUCED, produced))
        self.rates.spread(begin, at, rates)
        durations = [*_growth(_JUDGED, was, now), *_histogram_growth(was, now)]
        if durations:
            self.minute.spread(begin, at, durations)
        for priority, totals in now.by_priority.items():
            if grown := [*_growth(_JUDGED, was.by_priority.get(priority, _NONE_JUDGED), totals)]:
                bins = self.by_priority.setdefault(priority, RateBins(60, len(_JUDGED)))
                bins.spread(begin, at, grown)
        if now.arrived > was.arrived or now.in_flight:
            self.demand_at = at
        self.last_at = at


class SignalAggregator:
    """All reports since the start of the controller."""

    def __init__(self) -> None:
        self._replicas = ReplicaMetrics()
        self.energy = EnergyAttribution()
        self._workers: dict[str, _Worker] = {}
        self._models: dict[str, _Model] = {}
        self._began: float | None = None

    def take(self, report: GatewayReport, at: float) -> None:
        """Take the totals of a gateway worker; an outdated report is ignored."""
        worker = self._workers.get(report.worker)
        if worker is None:
            worker = self._join(report, at)
        elif report.number <= worker.number:
            return
        begin = worker.reported_at
        for name, now in report.models.items():
            was = worker.models.get(name, _NOTHING)
            level = (was.in_flight if name in worker.named else 0) + now.in_flight
            model = self._models.get(name)
            if model is None:
                model = self._models[name] = _Model(at)
            model.count(was, now, level / 2, begin, at)
            self.energy.computed(name, _computed(was, now), at)
        worker.models.update(report.models)
        worker.named = frozenset(report.models)
        worker.number, worker.reported_at, worker.left = report.number, at, report.last

    def take_beat(self, beat: Heartbeat, at: float) -> None:
        """Take the heartbeat of a replica."""
        self._replicas.take(beat, at)
        if beat.replica.state is ReplicaPhase.STOPPED:
            self.energy.forget(beat.replica.id)
        elif beat.gpus is not None:
            self.energy.spent(beat.replica, beat.gpus.joules, at)

    def gpus(self, at: float) -> dict[str, GpuReport]:
        """The last report on the GPUs of each replica that has some, by its id."""
        return self._replicas.gpus(at)

    def engines(self) -> dict[str, EngineReport]:
        """The last report of each engine, by the id of its replica."""
        return self._replicas.engines()

    def signals(self, model: str, at: float) -> Signals:
        """The signals of ``model``."""
        return Signals(demand=self._demand(model, at), replicas=self._replicas.figures(model, at))

    def drain_s(self, model: str, at: float) -> float:
        """In how many seconds the last of the running requests is expected to end."""
        known = self._models.get(model)
        workers = [] if known is None else self._reporting(model, known.last_at)
        # What was expected to end by now has ended, or the next report says so.
        left = [worker.models[model].drain_s - (at - worker.reported_at) for worker in workers]
        return max(0.0, *left) if left else 0.0

    def _reporting(self, model: str, end: float) -> list[_Worker]:
        """The workers whose last report named ``model``, before ``end``."""
        return [
            worker
            for worker in self._workers.values()
            if model in worker.named and not worker.left and worker.reported_at >= end - SILENT_S
        ]

    def _join(self, report: GatewayReport, at: float) -> _Worker:
        """Add a worker that is new, or was forgotten."""
        self._forget(at)
        young = report.since_s <= YOUNG_S
        began = at - report.since_s if young else at
        known = {} if young else dict(report.models)
        worker = self._workers[report.worker] = _Worker(began, None if young else at, known, frozenset(known))
        self._began = began if self._began is None else min(self._began, began)
        return worker

    def _forget(self, at: float) -> None:
        """Drop workers and models without a recent report."""
        self._workers = {
            n: worker for n, worker in self._workers.items() if worker.reported_at >= at - KEPT_S
        }
        self._models = {n: model for n, model in self._models.items() if model.last_at >= at - KEPT_S}

    def _demand(self, name: str, at: float) -> ModelDemand | None:
        """As of the last report that named the model, so that missing reports do not look like no demand."""
        model = self._models.get(name)
        if model is None:
            return None
        end = model.last_at
        reporting = self._reporting(name, end)
        last = [worker.models[name] for worker in reporting]
        arrivals, refused, concurrency = self._rates(model, reporting, sum(one.in_flight for one in last))
        minute = model.minute.sums(end - 60.0, end)
        ttft, itl, e2e = (_quantiles(minute[kind : kind + BUCKETS]) for kind, _ in _DURATIONS)
        like_s = model.rates.latest_s(end, _ENDED, ENOUGH, LATEST_S, LONGEST_S)
        lately = model.rates.sums(end - like_s, end)
        inputs, outputs = _mean_lengths(lately, last)
        return ModelDemand(
            age_s=at - min((worker.reported_at for worker in reporting), default=end),
            arrivals=arrivals,
            refused=refused,
            concurrency=concurrency,
            queued=sum(one.queued for one in last),
            oldest_s=max((one.oldest_s for one in last), default=0.0),
            ttft=ttft,
            itl=itl,
            e2e=e2e,
            met=_shares(*minute[: len(_JUDGED)]),
            input_tokens=inputs,
            output_tokens=outputs,
            hit=min(1.0, lately[_CACHED] / lately[_INPUT]) if lately[_INPUT] else 0.0,
            idle_s=end - model.demand_at,
            drain_s=self.drain_s(name, at),
            by_priority=_shares_by_priority(model, end),
        )

    def _rates(self, model: _Model, reporting: Sequence[_Worker], level: int) -> Iterator[Rates]:
        """Arrivals, refusals and concurrency, whose current value is ``level``."""
        means = [self._means(model, reporting, seconds, level) for seconds in (6.0, 20.0, 60.0, 600.0)]
        for six, twenty, sixty, long in zip(*means, strict=True):
            yield Rates(last_6_s=six, last_20_s=twenty, last_60_s=sixty, last_600_s=long)

    def _means(
        self, model: _Model, reporting: Sequence[_Worker], seconds: float, level: int
    ) -> tuple[float, float, float]:
        end = model.last_at
        sums = model.rates.sums(end - seconds, end)
        reported_s = max(1.0, self._reported_s(reporting, seconds, end, LEAST_S))
        # Unlike a rate, a level has no shortest time.
        level_s = self._reported_s(reporting, seconds, end, 0.0)
        concurrency = sums[_LEVEL] / level_s if level_s >= 1.0 else float(level)
        return sums[_ARRIVED] / reported_s, sums[_REFUSED] / reported_s, concurrency

    def _reported_s(self, reporting: Sequence[_Worker], seconds: float, end: float, least_s: float) -> float:
        """How many of the ``seconds`` before ``end`` the reports cover, as a mean over the workers.

        Workers report at different moments: one without a report yet is assumed to be like the others.
        """
        began = min(end if self._began is None else self._began, end - least_s)
        first = max(end - seconds, began)
        if not reporting:
            return end - first
        reported_s = 0.0
        for worker in reporting:
            since = end - seconds if worker.reported_from is None else worker.reported_from
            reported_s += max(0.0, worker.reported_at - max(first, min(since, end - least_s)))
        return reported_s / len(reporting)


def _mean_lengths(lately: Sequence[float], last: Sequence[ModelReport]) -> tuple[float, float]:
    """The mean tokens of a prompt and of an answer, by the sums ``lately``; 0 without a request in these.

    Few ended requests are filled up with those that ended before, as the workers' totals ``last`` have them,
    and those with assumed ones. A burst of long requests is seen before any of them
    ends: prompts as they arrive, answers as they grow. In a steady state as many tokens are produced per
    ended request as an answer has; while none has ended, the running streams are taken to be half done.
    """
    arrived, ended = lately[_ARRIVED], lately[_ENDED]
    if not arrived and not ended:
        return 0.0, 0.0
    total = sum(one.ended for one in last)
    missing = max(0.0, ASSUMED_REQUESTS - ended)
    before = min(missing, max(0.0, total - ended))
    assumed = missing - before
    prompts = sum(one.input_tokens for one in last)
    answers = sum(one.output_tokens for one in last)

    def mean(assumed_tokens: float, all_tokens: int, tokens: float) -> float:
        past = before * all_tokens / total if total else 0.0
        return (assumed * assumed_tokens + past + tokens) / (missing + ended)

    inputs = mean(ASSUMED_INPUT_TOKENS, prompts, lately[_INPUT])
    outputs = mean(ASSUMED_OUTPUT_TOKENS, answers, lately[_OUTPUT])
    if arrived >= ASSUMED_REQUESTS:
        inputs = max(inputs, lately[_ASKED] / arrived / NOTICEABLE)
    if running := sum(one.running for one in last):
        half_done = 2.0 * sum(one.running_tokens for one in last) / running
        produced = mean(ASSUMED_OUTPUT_TOKENS, answers, lately[_PRODUCED])
        outputs = max(outputs, min(produced, half_done) / NOTICEABLE)
    return inputs, outputs


def _computed(was: ModelReport, now: ModelReport) -> dict[str, int]:
    """The tokens that were computed between two reports, by adapter."""

    def total(one: ModelReport) -> int:
        return one.input_tokens - one.cached_tokens + one.output_tokens

    grown = {name: count - was.adapter_tokens.get(name, 0) for name, count in now.adapter_tokens.items()}
    grown[BASE] = total(now) - total(was) - sum(grown.values())
    return {name: count for name, count in grown.items() if count > 0}


def _shares_by_priority(model: _Model, end: float) -> dict[Priority, PriorityShares]:
    """What met the SLO of each priority of which a stream ended in the last minute."""
    sums = {priority: bins.sums(end - 60.0, end) for priority, bins in sorted(model.by_priority.items())}
    return {
        priority: PriorityShares(judged=round(judged[0]), met=_shares(*judged))
        for priority, judged in sums.items()
        if judged[0]
    }


def _growth(
    kinds: Iterable[tuple[int, str]], was: ModelReport | PriorityReport, now: ModelReport | PriorityReport
) -> Iterator[Count]:
    """The growth of each of these totals."""
    for kind, name in kinds:
        if (more := getattr(now, name) - getattr(was, name)) > 0:
            yield kind, more


def _histogram_growth(was: ModelReport, now: ModelReport) -> Iterator[Count]:
    """The growth of each bucket of the histograms."""
    for kind, name in _DURATIONS:
        before, after = getattr(was, name), getattr(now, name)
        # Buckets of another version cannot be compared.
        if before != after and len(before) == len(after):
            growth = (more - less for less, more in zip(before, after, strict=True))
            yield from ((kind + bucket, more) for bucket, more in enumerate(growth) if more > 0)


def _quantiles(counts: Sequence[float]) -> LatencyQuantiles | None:
    if not any(counts):
        return None
    p50, p90, p95, p99 = (quantile(counts, part) or 0.0 for part in (0.5, 0.9, 0.95, 0.99))
    return LatencyQuantiles(count=round(sum(counts)), p50=p50, p90=p90, p95=p95, p99=p99)


def _shares(judged: float, ttft: float, itl: float, both: float) -> Shares:
    if not judged:
        return Shares()
    return Shares(ttft=ttft / judged, itl=itl / judged, both=both / judged)
