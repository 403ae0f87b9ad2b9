"""What many workers told, at whatever moments, with whatever losses and restarts, as one set of figures."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.signals.aggregator import KEPT_S, SignalAggregator
from policy.signals.types import Demand, Rates
from policy.stats.histogram import BUCKETS, bucket_of, quantile
from policy.wire.reports import GatewayReport, ModelReport

T = 1000.0


def placed(*seconds: float) -> tuple[int, ...]:
    counts = [0] * BUCKETS
    for one in seconds:
        counts[bucket_of(one)] += 1
    return tuple(counts)


class Teller:
    """A gateway worker that began at ``began`` and has a rate of arrivals."""

    def __init__(
        self, gathering: SignalAggregator | None = None, name: str = "w", *, began: float = T
    ) -> None:
        self.gathering = gathering or SignalAggregator()
        self.name = name
        self.began = began
        self.number = 0
        self.totals: dict[str, Any] = {}

    def tell(self, at: float, *, model: str = "m", last: bool = False, **grown: Any) -> GatewayReport:
        """Its totals grow, and it says so; levels are set instead."""
        for name, value in grown.items():
            if name in ("queued", "oldest_s", "in_flight"):
                self.totals[name] = value
            elif isinstance(value, tuple):
                before = self.totals.get(name, (0,) * BUCKETS)
                self.totals[name] = tuple(a + b for a, b in zip(before, value, strict=True))
            else:
                self.totals[name] = self.totals.get(name, 0) + value
        report = self.silently(at, model=model, last=last)
        self.gathering.take(report, at)
        return report

    def silently(self, at: float, *, model: str = "m", last: bool = False) -> GatewayReport:
        """A report that gets lost, or comes later."""
        self.number += 1
        said = msgspec.json.encode(
            GatewayReport(
                worker=self.name,
                number=self.number,
                since_s=at - self.began,
                models={model: ModelReport(**self.totals)},
                last=last,
            )
        )
        return msgspec.json.decode(said, type=GatewayReport)


def demand(gathering: SignalAggregator, at: float, model: str = "m") -> Demand:
    found = gathering.signals(model, at).demand
    assert found is not None
    return found


def steady(teller: Teller, begin: float, end: float, rate: float, **levels: Any) -> None:
    """So many arrivals a second, told each second."""
    at = begin
    while at < end - 1e-9:
        at += 1.0
        teller.tell(at, arrived=int(rate), **levels)


def rates(rates: Rates) -> list[float]:
    return [rates.last_6_s, rates.last_20_s, rates.last_60_s, rates.last_600_s]


def test_a_step_of_load_is_seen_first_in_the_short_window() -> None:
    teller = Teller()
    steady(teller, T, T + 600, 1)
    steady(teller, T + 600, T + 606, 10)
    six, twenty, minute, long = rates(demand(teller.gathering, T + 606).arrivals)
    assert six == pytest.approx(10.0, rel=0.01)
    assert twenty == pytest.approx((14 + 60) / 20, rel=0.01)
    assert minute == pytest.approx((54 + 60) / 60, rel=0.01)
    assert long == pytest.approx((594 + 60) / 600, rel=0.01)


def test_workers_that_tell_at_different_moments_lower_no_rate() -> None:
    gathering = SignalAggregator()
    tellers = [Teller(gathering, f"w{i}", began=T - 1 + 0.25 * (i + 1)) for i in range(4)]
    for second in range(30):
        for i, teller in enumerate(tellers):
            teller.tell(T + second + 0.25 * (i + 1), arrived=5)
    seen = demand(gathering, T + 30)
    assert rates(seen.arrivals)[:2] == pytest.approx([20.0, 20.0], rel=0.02)


def test_a_lost_report_is_made_good_by_the_next_and_spread_over_both() -> None:
    teller = Teller()
    steady(teller, T, T + 60, 4)
    teller.tell(T + 90, arrived=120)
    seen = demand(teller.gathering, T + 90)
    assert rates(seen.arrivals)[:3] == pytest.approx([4.0] * 3, rel=0.01)


def test_a_report_that_comes_late_or_twice_counts_nothing() -> None:
    teller = Teller()
    early = teller.silently(T + 1)
    again = teller.tell(T + 2, arrived=10)
    before = demand(teller.gathering, T + 2)
    teller.gathering.take(early, T + 2)
    teller.gathering.take(again, T + 2)
    assert demand(teller.gathering, T + 2) == before


def test_a_restarted_controller_takes_no_history_for_a_burst() -> None:
    teller = Teller(began=T - 3600)
    teller.tell(T, arrived=100_000, in_flight=8)
    assert rates(demand(teller.gathering, T).arrivals) == [0.0] * 4
    assert rates(demand(teller.gathering, T).concurrency) == [8.0] * 4
    steady(teller, T, T + 10, 5)
    seen = demand(teller.gathering, T + 10)
    assert rates(seen.arrivals) == pytest.approx([5.0] * 4, rel=0.02)
    assert rates(seen.concurrency) == pytest.approx([8.0] * 4, rel=0.02)


def test_the_first_request_after_a_start_is_no_burst() -> None:
    gathering = SignalAggregator()
    Teller(gathering).tell(T + 0.05, arrived=1, in_flight=1, queued=1, oldest_s=0.05)
    seen = demand(gathering, T + 0.05)
    assert max(rates(seen.arrivals)) <= 1 / 3
    assert (seen.queued, seen.oldest_s, seen.concurrency.last_6_s) == (1, 0.05, 1.0)


def test_a_silent_worker_counts_until_it_was_silent_for_ten_seconds() -> None:
    gathering = SignalAggregator()
    dies, lives = Teller(gathering, "dies"), Teller(gathering, "lives")
    dies.tell(T + 1, arrived=1, queued=4, in_flight=4)
    steady(lives, T, T + 10, 2, queued=1)
    assert (demand(gathering, T + 10).queued, demand(gathering, T + 10).age_s) == (5, 9.0)
    lives.tell(T + 11.5, arrived=3)
    assert (demand(gathering, T + 11.5).queued, demand(gathering, T + 11.5).age_s) == (1, 0.0)


def test_a_worker_that_dies_lowers_no_rate_before_it_is_known_to_be_dead() -> None:
    gathering = SignalAggregator()
    dies, lives = Teller(gathering, "dies"), Teller(gathering, "lives")
    steady(dies, T, T + 60, 10)
    steady(lives, T, T + 60, 10)
    steady(lives, T + 60, T + 64, 10)
    assert demand(gathering, T + 64).arrivals.last_6_s == pytest.approx(20.0, rel=0.02)


def test_a_worker_that_says_goodbye_counts_no_more_at_once() -> None:
    gathering = SignalAggregator()
    leaves, stays = Teller(gathering, "leaves"), Teller(gathering, "stays")
    leaves.tell(T + 1, arrived=5, queued=5, in_flight=5)
    stays.tell(T + 1, queued=1)
    last = leaves.tell(T + 2, last=True, arrived=1, queued=0, in_flight=0)
    stays.tell(T + 3)
    seen = demand(gathering, T + 3)
    assert (seen.queued, seen.age_s) == (1, 0.0)
    assert seen.arrivals.last_600_s * 3 == pytest.approx(6.0)
    gathering.take(msgspec.structs.replace(last, number=1, last=False), T + 3)
    assert demand(gathering, T + 3) == seen


def test_what_nobody_tells_any_more_stays_and_ages() -> None:
    gathering = SignalAggregator()
    steady(Teller(gathering), T, T + 60, 9, queued=2, in_flight=5)
    seen = demand(gathering, T + 60)
    later = demand(gathering, T + 360)
    assert later.age_s == 300.0
    assert msgspec.structs.replace(later, age_s=seen.age_s) == seen


def test_all_that_said_goodbye_leave_an_age_too() -> None:
    teller = Teller()
    teller.tell(T + 1, arrived=1, in_flight=1)
    teller.tell(T + 2, last=True, in_flight=0)
    assert (demand(teller.gathering, T + 50).age_s, demand(teller.gathering, T + 50).queued) == (48.0, 0)


def test_idle_since_the_last_request_or_the_first_report() -> None:
    teller = Teller(began=T - 5)
    teller.tell(T)
    teller.tell(T + 30)
    assert demand(teller.gathering, T + 30).idle_s == 30.0
    teller.tell(T + 31, arrived=1, in_flight=1)
    assert demand(teller.gathering, T + 31).idle_s == 0.0
    teller.tell(T + 99, in_flight=1)
    assert demand(teller.gathering, T + 99).idle_s == 0.0
    teller.tell(T + 100, in_flight=0)
    teller.tell(T + 160)
    assert demand(teller.gathering, T + 160).idle_s == 61.0


def test_nobody_is_idle_by_being_silent() -> None:
    gathering = SignalAggregator()
    Teller(gathering).tell(T + 1, arrived=1)
    assert demand(gathering, T + 5000).idle_s == 0.0


def test_means_of_what_requests_cost() -> None:
    teller = Teller()
    assert teller.tell(T + 1) and demand(teller.gathering, T + 1).input_tokens == 0.0
    teller.tell(T + 2, ended=4, input_tokens=400, cached_tokens=100, output_tokens=60)
    seen = demand(teller.gathering, T + 2)
    assert (seen.input_tokens, seen.output_tokens, seen.hit) == pytest.approx((100.0, 15.0, 0.25))


def test_what_requests_are_like_is_said_by_the_latest_that_are_enough() -> None:
    teller = Teller()
    teller.tell(T + 1)
    # Six minutes of few long ones, and then a minute of many short ones.
    for second in range(2, 362):
        teller.tell(T + second, ended=1, input_tokens=6000, output_tokens=100)
    few = demand(teller.gathering, T + 361)
    assert few.input_tokens == pytest.approx(6000.0)
    for second in range(362, 392):
        teller.tell(T + second, ended=20, input_tokens=20 * 300, output_tokens=20 * 300)
    many = demand(teller.gathering, T + 391)
    assert many.input_tokens == pytest.approx((600 * 300 + 30 * 6000) / 630, rel=0.05)
    assert many.output_tokens > 250


def test_quantiles_and_shares_of_the_last_minute() -> None:
    teller = Teller()
    teller.tell(T + 1, ttft=placed(*[5.0] * 50), judged=50)
    assert demand(teller.gathering, T + 1).met.ttft == 0.0
    for second in range(2, 63):
        teller.tell(T + second, ttft=placed(0.1, 0.2), judged=2, met_ttft=2, met_itl=1, met_both=1)
    seen = demand(teller.gathering, T + 62)
    assert seen.ttft is not None and seen.ttft.count == pytest.approx(120, abs=2)
    assert seen.ttft.p99 < 0.25
    assert seen.itl is None
    assert (seen.met.ttft, seen.met.itl, seen.met.both) == pytest.approx((1.0, 0.5, 0.5))


def test_what_nobody_judged_was_met() -> None:
    gathering = SignalAggregator()
    Teller(gathering).tell(T + 1, arrived=1)
    assert (demand(gathering, T + 1).met.both, demand(gathering, T + 1).ttft) == (1.0, None)


def test_buckets_of_another_version_are_passed_over() -> None:
    teller = Teller()
    teller.totals["ttft"] = (1, 2, 3)
    teller.tell(T + 1, arrived=2)
    assert demand(teller.gathering, T + 1).ttft is None


def test_what_is_long_gone_is_forgotten() -> None:
    gathering = SignalAggregator()
    for i in range(50):
        Teller(gathering, f"w{i}").tell(T + i, model=f"m{i}", arrived=1)
    Teller(gathering, "new", began=T + 50 + KEPT_S).tell(T + 51 + KEPT_S, arrived=1)
    assert len(gathering._workers) == len(gathering._models) == 1


Step = tuple[int, int, bool, bool]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 50), st.booleans(), st.booleans()),
        min_size=1, max_size=60,
    ),
    st.integers(0, 1 << 32),
)  # fmt: skip
def test_every_arrival_counts_once_whatever_is_lost_late_or_restarted(steps: list[Step], seed: int) -> None:
    gathering, rng = SignalAggregator(), random.Random(seed)  # noqa: S311 - an order
    tellers = [Teller(gathering, f"w{i}") for i in range(3)]
    told, at, late = 0, T, []
    for place_, arrived, lost, restarts in steps:
        at += rng.uniform(0.01, 5.0)
        teller = tellers[place_]
        if lost:
            teller.totals["arrived"] = teller.totals.get("arrived", 0) + arrived
            late.append(teller.silently(at))
        else:
            teller.tell(at, arrived=arrived)
        told += arrived
        if late and rng.random() < 0.5:
            gathering.take(late.pop(rng.randrange(len(late))), at)
        if restarts:
            teller.tell(at, last=rng.random() < 0.5)
            tellers[place_] = Teller(gathering, f"{teller.name}+", began=at)
    for teller in tellers:
        teller.tell(at)
    counted = gathering._models["m"].rates.sums(T - 1.0, at)[0]
    assert counted == pytest.approx(told)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.0005, 100.0)), min_size=1, max_size=80),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_quantiles_of_many_workers_are_those_of_one(seen: list[tuple[int, float]], part: float) -> None:
    gathering = SignalAggregator()
    tellers = [Teller(gathering, f"w{i}", began=T - 1) for i in range(4)]
    for i, seconds in seen:
        tellers[i].tell(T, ttft=placed(seconds))
    whole = quantile(placed(*(seconds for _, seconds in seen)), part)
    merged = demand(gathering, T).ttft
    assert merged is not None and merged.count == len(seen)
    assert {0.5: merged.p50, 0.9: merged.p90, 0.95: merged.p95, 0.99: merged.p99}[part] == pytest.approx(
        whole
    )
