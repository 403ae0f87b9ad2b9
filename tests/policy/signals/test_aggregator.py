"""Reports of many workers, with delays, losses and restarts, as one set of figures."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.control import ControlConfig, SloConfig
from policy.signals.aggregator import KEPT_S, SignalAggregator
from policy.signals.gateway_worker_counters import WorkerCounters
from policy.signals.types import ModelDemand, Rates
from policy.stats.histogram import BUCKETS, bucket_of, quantile
from policy.types import Priority
from policy.wire.controller_reports import GatewayReport, ModelReport

T = 1000.0


def histogram(*seconds: float) -> tuple[int, ...]:
    counts = [0] * BUCKETS
    for one in seconds:
        counts[bucket_of(one)] += 1
    return tuple(counts)


class Worker:
    """A gateway worker that began at ``began`` and sends reports."""

    def __init__(
        self, aggregator: SignalAggregator | None = None, name: str = "w", *, began: float = T
    ) -> None:
        self.aggregator = aggregator or SignalAggregator()
        self.name = name
        self.began = began
        self.number = 0
        self.totals: dict[str, Any] = {}

    def report_at(self, at: float, *, model: str = "m", last: bool = False, **grown: Any) -> GatewayReport:
        """Send a report: totals grow by ``grown``, levels are set."""
        for name, value in grown.items():
            if name in ("queued", "oldest_s", "in_flight", "running", "running_tokens", "drain_s"):
                self.totals[name] = value
            elif isinstance(value, tuple):
                before = self.totals.get(name, (0,) * BUCKETS)
                self.totals[name] = tuple(a + b for a, b in zip(before, value, strict=True))
            else:
                self.totals[name] = self.totals.get(name, 0) + value
        report = self.unsent_report(at, model=model, last=last)
        self.aggregator.take(report, at)
        return report

    def unsent_report(self, at: float, *, model: str = "m", last: bool = False) -> GatewayReport:
        """A report that is lost or arrives later."""
        self.number += 1
        encoded = msgspec.json.encode(
            GatewayReport(
                worker=self.name,
                number=self.number,
                since_s=at - self.began,
                models={model: ModelReport(**self.totals)},
                last=last,
            )
        )
        return msgspec.json.decode(encoded, type=GatewayReport)


def demand(aggregator: SignalAggregator, at: float, model: str = "m") -> ModelDemand:
    found = aggregator.signals(model, at).demand
    assert found is not None
    return found


def steady(worker: Worker, begin: float, end: float, rate: float, **levels: Any) -> None:
    """``rate`` arrivals per second, reported each second."""
    at = begin
    while at < end - 1e-9:
        at += 1.0
        worker.report_at(at, arrived=int(rate), **levels)


def rates(rates: Rates) -> list[float]:
    return [rates.last_6_s, rates.last_20_s, rates.last_60_s, rates.last_600_s]


def test_a_step_of_load_is_seen_first_in_the_short_window() -> None:
    worker = Worker()
    steady(worker, T, T + 600, 1)
    steady(worker, T + 600, T + 606, 10)
    six, twenty, minute, long = rates(demand(worker.aggregator, T + 606).arrivals)
    assert six == pytest.approx(10.0, rel=0.01)
    assert twenty == pytest.approx((14 + 60) / 20, rel=0.01)
    assert minute == pytest.approx((54 + 60) / 60, rel=0.01)
    assert long == pytest.approx((594 + 60) / 600, rel=0.01)


def test_reports_at_different_instants_do_not_lower_the_rate() -> None:
    aggregator = SignalAggregator()
    workers = [Worker(aggregator, f"w{i}", began=T - 1 + 0.25 * (i + 1)) for i in range(4)]
    for second in range(30):
        for i, worker in enumerate(workers):
            worker.report_at(T + second + 0.25 * (i + 1), arrived=5)
    seen = demand(aggregator, T + 30)
    assert rates(seen.arrivals)[:2] == pytest.approx([20.0, 20.0], rel=0.02)


def test_the_report_after_a_lost_one_is_spread_over_both_intervals() -> None:
    worker = Worker()
    steady(worker, T, T + 60, 4)
    worker.report_at(T + 90, arrived=120)
    seen = demand(worker.aggregator, T + 90)
    assert rates(seen.arrivals)[:3] == pytest.approx([4.0] * 3, rel=0.01)


def test_late_and_duplicate_reports_are_ignored() -> None:
    worker = Worker()
    early = worker.unsent_report(T + 1)
    again = worker.report_at(T + 2, arrived=10)
    before = demand(worker.aggregator, T + 2)
    worker.aggregator.take(early, T + 2)
    worker.aggregator.take(again, T + 2)
    assert demand(worker.aggregator, T + 2) == before


def test_a_restarted_controller_does_not_count_old_totals_as_a_burst() -> None:
    worker = Worker(began=T - 3600)
    worker.report_at(T, arrived=100_000, in_flight=8)
    assert rates(demand(worker.aggregator, T).arrivals) == [0.0] * 4
    assert rates(demand(worker.aggregator, T).concurrency) == [8.0] * 4
    steady(worker, T, T + 10, 5)
    seen = demand(worker.aggregator, T + 10)
    assert rates(seen.arrivals) == pytest.approx([5.0] * 4, rel=0.02)
    assert rates(seen.concurrency) == pytest.approx([8.0] * 4, rel=0.02)


def test_the_first_request_after_a_start_is_no_burst() -> None:
    aggregator = SignalAggregator()
    Worker(aggregator).report_at(T + 0.05, arrived=1, in_flight=1, queued=1, oldest_s=0.05)
    seen = demand(aggregator, T + 0.05)
    assert max(rates(seen.arrivals)) <= 1 / 3
    assert (seen.queued, seen.oldest_s, seen.concurrency.last_6_s) == (1, 0.05, 1.0)


def test_a_silent_worker_is_dropped_after_ten_seconds() -> None:
    aggregator = SignalAggregator()
    dead, alive = Worker(aggregator, "dead"), Worker(aggregator, "alive")
    dead.report_at(T + 1, arrived=1, queued=4, in_flight=4)
    steady(alive, T, T + 10, 2, queued=1)
    assert (demand(aggregator, T + 10).queued, demand(aggregator, T + 10).age_s) == (5, 9.0)
    alive.report_at(T + 11.5, arrived=3)
    assert (demand(aggregator, T + 11.5).queued, demand(aggregator, T + 11.5).age_s) == (1, 0.0)


def test_a_dead_worker_does_not_lower_the_rate_before_its_timeout() -> None:
    aggregator = SignalAggregator()
    dead, alive = Worker(aggregator, "dead"), Worker(aggregator, "alive")
    steady(dead, T, T + 60, 10)
    steady(alive, T, T + 60, 10)
    steady(alive, T + 60, T + 64, 10)
    assert demand(aggregator, T + 64).arrivals.last_6_s == pytest.approx(20.0, rel=0.02)


def test_a_worker_is_dropped_at_its_last_report() -> None:
    aggregator = SignalAggregator()
    ended, running = Worker(aggregator, "ended"), Worker(aggregator, "running")
    ended.report_at(T + 1, arrived=5, queued=5, in_flight=5)
    running.report_at(T + 1, queued=1)
    last = ended.report_at(T + 2, last=True, arrived=1, queued=0, in_flight=0)
    running.report_at(T + 3)
    seen = demand(aggregator, T + 3)
    assert (seen.queued, seen.age_s) == (1, 0.0)
    assert seen.arrivals.last_600_s * 3 == pytest.approx(6.0)
    aggregator.take(msgspec.structs.replace(last, number=1, last=False), T + 3)
    assert demand(aggregator, T + 3) == seen


def test_figures_without_new_reports_stay_and_age() -> None:
    aggregator = SignalAggregator()
    steady(Worker(aggregator), T, T + 60, 9, queued=2, in_flight=5)
    seen = demand(aggregator, T + 60)
    later = demand(aggregator, T + 360)
    assert later.age_s == 300.0
    assert msgspec.structs.replace(later, age_s=seen.age_s) == seen


def test_figures_age_after_all_workers_have_ended() -> None:
    worker = Worker()
    worker.report_at(T + 1, arrived=1, in_flight=1)
    worker.report_at(T + 2, last=True, in_flight=0)
    assert (demand(worker.aggregator, T + 50).age_s, demand(worker.aggregator, T + 50).queued) == (48.0, 0)


def test_idle_since_the_last_request_or_the_first_report() -> None:
    worker = Worker(began=T - 5)
    worker.report_at(T)
    worker.report_at(T + 30)
    assert demand(worker.aggregator, T + 30).idle_s == 30.0
    worker.report_at(T + 31, arrived=1, in_flight=1)
    assert demand(worker.aggregator, T + 31).idle_s == 0.0
    worker.report_at(T + 99, in_flight=1)
    assert demand(worker.aggregator, T + 99).idle_s == 0.0
    worker.report_at(T + 100, in_flight=0)
    worker.report_at(T + 160)
    assert demand(worker.aggregator, T + 160).idle_s == 61.0


def test_time_without_reports_is_not_idle_time() -> None:
    aggregator = SignalAggregator()
    Worker(aggregator).report_at(T + 1, arrived=1)
    assert demand(aggregator, T + 5000).idle_s == 0.0


def test_token_figures_are_means_per_request() -> None:
    worker = Worker()
    assert worker.report_at(T + 1) and demand(worker.aggregator, T + 1).input_tokens == 0.0
    worker.report_at(T + 2, ended=40, input_tokens=4000, cached_tokens=1000, output_tokens=600)
    seen = demand(worker.aggregator, T + 2)
    assert (seen.input_tokens, seen.output_tokens, seen.hit) == pytest.approx((100.0, 15.0, 0.25))


def test_request_lengths_are_means_of_enough_recent_requests() -> None:
    worker = Worker()
    worker.report_at(T + 1)
    # Six minutes of few long requests, then a minute of many short ones.
    for second in range(2, 362):
        worker.report_at(T + second, ended=1, input_tokens=6000, output_tokens=100)
    few = demand(worker.aggregator, T + 361)
    assert few.input_tokens == pytest.approx(6000.0)
    for second in range(362, 392):
        worker.report_at(T + second, ended=20, input_tokens=20 * 300, output_tokens=20 * 300)
    many = demand(worker.aggregator, T + 391)
    assert many.input_tokens == pytest.approx((600 * 300 + 30 * 6000) / 630, rel=0.05)
    assert many.output_tokens > 250


def test_a_probe_of_one_token_is_not_taken_for_the_load() -> None:
    worker = Worker()
    worker.report_at(T + 1, ended=1, input_tokens=2, output_tokens=1)
    seen = demand(worker.aggregator, T + 1)
    assert (seen.input_tokens, seen.output_tokens) == pytest.approx((15 * 512 / 16, 15 * 128 / 16), abs=1)


def test_sparse_requests_have_their_lengths_after_the_first_sixteen() -> None:
    """Five requests in ten minutes: the first ones are averaged with assumed lengths, later ones are not."""
    worker = Worker()
    worker.report_at(T)
    means = []
    for i in range(1, 41):
        worker.report_at(T + 120 * i, arrived=1, ended=1, input_tokens=20_000, output_tokens=1_000)
        seen = demand(worker.aggregator, T + 120 * i)
        means.append((seen.input_tokens, seen.output_tokens))
    assert means[0] == pytest.approx(((15 * 512 + 20_000) / 16, (15 * 128 + 1_000) / 16))
    assert means[15:] == [pytest.approx((20_000.0, 1_000.0))] * 25


@pytest.mark.parametrize("before", [0, 600])
def test_a_burst_of_long_requests_is_seen_before_one_of_them_ends(before: int) -> None:
    worker = Worker()
    short = {"arrived_tokens": 100 * before, "input_tokens": 100 * before, "output_tokens": 20 * before}
    worker.report_at(T + 60, arrived=before, ended=before, **short)
    worker.report_at(T + 61, arrived=400, arrived_tokens=400 * 4000, in_flight=400)
    assert demand(worker.aggregator, T + 61).input_tokens > 0.7 * (before * 100 + 400 * 4000) / (before + 400)
    for second in range(2, 12):
        worker.report_at(T + 60 + second, running=400, running_tokens=400 * 50 * second)
    # All have produced 550 tokens so far, and none has ended.
    mix = (before * 20 + 400 * 550) / (before + 400)
    assert 0.7 * mix < demand(worker.aggregator, T + 71).output_tokens <= 2 * 550


def test_running_streams_do_not_change_the_lengths_of_a_steady_load() -> None:
    """Ten requests a second of 50 tokens, 100 streams that are half done on average."""
    worker = Worker()
    level = {"running": 100, "running_tokens": 2500, "in_flight": 100}
    for second in range(1, 100):
        each = {"arrived_tokens": 1000, "input_tokens": 1000, "output_tokens": 500}
        worker.report_at(T + second, arrived=10, ended=10, **each, **level)
    seen = demand(worker.aggregator, T + 99)
    assert (seen.input_tokens, seen.output_tokens) == pytest.approx((100.0, 50.0))


def test_quantiles_and_shares_of_the_last_minute() -> None:
    worker = Worker()
    worker.report_at(T + 1, ttft=histogram(*[5.0] * 50), judged=50)
    assert demand(worker.aggregator, T + 1).met.ttft == 0.0
    for second in range(2, 63):
        worker.report_at(T + second, ttft=histogram(0.1, 0.2), judged=2, met_ttft=2, met_itl=1, met_both=1)
    seen = demand(worker.aggregator, T + 62)
    assert seen.ttft is not None and seen.ttft.count == pytest.approx(120, abs=2)
    assert seen.ttft.p99 < 0.25
    assert seen.itl is None
    assert (seen.met.ttft, seen.met.itl, seen.met.both) == pytest.approx((1.0, 0.5, 0.5))


def test_without_judged_requests_the_slo_counts_as_met() -> None:
    aggregator = SignalAggregator()
    Worker(aggregator).report_at(T + 1, arrived=1)
    assert (demand(aggregator, T + 1).met.both, demand(aggregator, T + 1).ttft) == (1.0, None)


def test_buckets_of_another_version_are_ignored() -> None:
    worker = Worker()
    worker.totals["ttft"] = (1, 2, 3)
    worker.report_at(T + 1, arrived=2)
    assert demand(worker.aggregator, T + 1).ttft is None


def test_old_workers_and_models_are_dropped() -> None:
    aggregator = SignalAggregator()
    for i in range(50):
        Worker(aggregator, f"w{i}").report_at(T + i, model=f"m{i}", arrived=1)
    Worker(aggregator, "new", began=T + 50 + KEPT_S).report_at(T + 51 + KEPT_S, arrived=1)
    assert len(aggregator._workers) == len(aggregator._models) == 1


Step = tuple[int, int, bool, bool]


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 50), st.booleans(), st.booleans()),
        min_size=1, max_size=60,
    ),
    st.integers(0, 1 << 32),
)  # fmt: skip
def test_every_arrival_counts_once_whatever_is_lost_late_or_restarted(steps: list[Step], seed: int) -> None:
    aggregator, rng = SignalAggregator(), random.Random(seed)  # noqa: S311 - an order
    workers = [Worker(aggregator, f"w{i}") for i in range(3)]
    total, at, delayed = 0, T, []
    for index, arrived, lost, restarts in steps:
        at += rng.uniform(0.01, 5.0)
        worker = workers[index]
        if lost:
            worker.totals["arrived"] = worker.totals.get("arrived", 0) + arrived
            delayed.append(worker.unsent_report(at))
        else:
            worker.report_at(at, arrived=arrived)
        total += arrived
        if delayed and rng.random() < 0.5:
            aggregator.take(delayed.pop(rng.randrange(len(delayed))), at)
        if restarts:
            worker.report_at(at, last=rng.random() < 0.5)
            workers[index] = Worker(aggregator, f"{worker.name}+", began=at)
    for worker in workers:
        worker.report_at(at)
    counted = aggregator._models["m"].rates.sums(T - 1.0, at)[0]
    assert counted == pytest.approx(total)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.0005, 100.0)), min_size=1, max_size=80),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_quantiles_of_many_workers_are_those_of_one(seen: list[tuple[int, float]], part: float) -> None:
    aggregator = SignalAggregator()
    workers = [Worker(aggregator, f"w{i}", began=T - 1) for i in range(4)]
    for i, seconds in seen:
        workers[i].report_at(T, ttft=histogram(seconds))
    whole = quantile(histogram(*(seconds for _, seconds in seen)), part)
    merged = demand(aggregator, T).ttft
    assert merged is not None and merged.count == len(seen)
    assert {0.5: merged.p50, 0.9: merged.p90, 0.95: merged.p95, 0.99: merged.p99}[part] == pytest.approx(
        whole
    )


def test_each_priority_is_judged_by_its_own_slo() -> None:
    counters = WorkerCounters()
    strict, loose = SloConfig(ttft_p95_s=0.5), SloConfig(ttft_p95_s=9.0)
    counters.set_slo(ControlConfig(slo=loose, slo_by_priority={Priority.CRITICAL: strict}))
    for priority, ttft_s in ((Priority.CRITICAL, 0.4), (Priority.CRITICAL, 2.0), (Priority.BATCH, 5.0)):
        counters.first_token(ttft_s, priority)
        counters.judge(ttft_s, 0.0, priority)
    aggregator = SignalAggregator()
    totals = counters.report(in_flight=0, queued=0, oldest_s=0.0, running=(0, 0), drain_s=0.0)
    aggregator.take(GatewayReport(worker="w", number=0, since_s=1.0, models={"m": totals}), T)
    demand = aggregator.signals("m", T).demand
    assert demand is not None and demand.ttft is not None
    found = {priority: (each.judged, each.met.ttft) for priority, each in demand.by_priority.items()}
    assert found == {Priority.CRITICAL: (2, 0.5), Priority.BATCH: (1, 1.0)}
    assert demand.met.ttft == pytest.approx(2 / 3)
    assert demand.ttft.count == 2, "latencies are compared with the strictest target, which batch has not"


def test_the_last_running_request_of_any_worker_ends_the_drain() -> None:
    one = Worker()
    other = Worker(one.aggregator, "other")
    one.report_at(T + 1.0, in_flight=1, drain_s=30.0)
    other.report_at(T + 2.0, in_flight=1, drain_s=4.0)
    assert one.aggregator.drain_s("m", T + 3.0) == pytest.approx(28.0)
    one.report_at(T + 4.0, in_flight=0, drain_s=0.0)
    assert one.aggregator.drain_s("m", T + 4.0) == pytest.approx(2.0)
    assert demand(one.aggregator, T + 9.0).drain_s == one.aggregator.drain_s("unknown", T) == 0.0
