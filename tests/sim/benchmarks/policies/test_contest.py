"""Every policy on the same setup, and the ranking of the results."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from policy.scaling.policies.predictive import Predictive
from policy.scaling.policies.registry import choose
from sim.benchmarks.policies import run as contest
from sim.benchmarks.policies.benchmark_setup import MODEL, PolicyBenchmarkSetup, TraceHalf, setup_of
from sim.benchmarks.policies.chart import chart
from sim.benchmarks.policies.gpu_time_ranking import rank
from sim.benchmarks.policies.run import (
    PolicyTrialResult,
    describe,
    parameter_steps,
    run_all,
    run_trial,
    trials,
)
from sim.benchmarks.policies.sizing import ReplicaAtCapacity, ReplicaSize, size_of
from sim.results.evaluation_metrics import Score

SIZE = ReplicaSize(mu=0.5, factor=1.0, full=ReplicaAtCapacity(at_once=9.0, kv_used=0.6, least=8, most=18))
BEGAN = datetime(2023, 11, 16, 18, 15)


def trace(folder: Path, requests: int = 400, each_s: float = 1.0, tokens: int = 500) -> Path:
    rows = [f"{BEGAN + timedelta(seconds=i * each_s)},{tokens + i % 7},20" for i in range(requests)]
    path = folder / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_the_scored_stretch_of_both_halves_begins_after_the_warm_up(tmp_path: Path) -> None:
    path = trace(tmp_path, 4000)
    first, second = (setup_of(path, half) for half in (TraceHalf.TUNING, TraceHalf.TEST))
    assert first.lasts_s == pytest.approx(3999.0)
    assert (first.begins_s, first.stretch.since, first.stretch.until) == (0.0, 300.0, 1999.5)
    assert (second.begins_s, second.stretch.since, second.stretch.until) == (1699.5, 300.0, 2299.5)
    arrivals = second.arrivals(1.0, 0)
    assert 0.0 <= arrivals[0].at < 10.0
    assert 2280.0 < arrivals[-1].at < 2299.5


def test_long_prompts_are_simulated_on_a_gpu_that_holds_them(tmp_path: Path) -> None:
    short = setup_of(trace(tmp_path), TraceHalf.TUNING)
    long = setup_of(trace(tmp_path, tokens=9000), TraceHalf.TUNING)
    assert (short.profile, long.profile) == ("l4-8b", "h100-8b")
    scale = {"hold_s": 5.0}
    control = short.deployment(30.0, scale).model(MODEL).control
    assert (control.assumed_start_s, control.scale.hold_s, control.slo.attainment) == (30.0, 5.0, 0.99)


def test_all_policies_share_the_arrivals_and_include_the_default_settings(tmp_path: Path) -> None:
    setup = setup_of(trace(tmp_path), TraceHalf.TUNING)
    field = trials(setup, SIZE, ["static", "predictive"], leads_s=[30.0, 120.0], seeds=range(2))
    assert len(field) == 2 * 2 * (
        1 + len(parameter_steps("static", SIZE)) + len(parameter_steps("predictive", SIZE))
    )
    searches = [each for each in field if each.name == contest.PLAN]
    assert [each.searched for each in searches] == [contest.SEARCHED] * 4
    assert [(each.lead_s, each.seed) for each in searches] == [(30.0, 0), (30.0, 1), (120.0, 0), (120.0, 1)]
    assert not any(each.searched for each in field if each.name != contest.PLAN)
    quick = parameter_steps("predictive", SIZE, 3)
    for settings in (parameter_steps("predictive", SIZE), quick):
        assert Predictive() in [choose("policy", choice).policy for choice in settings]
    assert len(quick) < len(parameter_steps("predictive", SIZE))
    assert describe("static") == ""
    assert describe({"static": {"replicas": 3}}) == "replicas 3"


def result(
    setup: PolicyBenchmarkSetup,
    name: str,
    setting: str,
    *,
    hours: float,
    attained: float,
    seed: int = 0,
    mu: float | None = 0.5,
) -> PolicyTrialResult:
    score = Score(
        attainment=attained,
        gpu_hours=hours,
        ttft_p50_s=0.3,
        ttft_p99_s=1.2,
        itl_p95_s=0.1,
        goodput_rps=4.0,
        goodput_per_gpu_hour=1000.0,
        recovery_s=30.0,
        requests=1000,
        failed=0,
    )
    trial = contest.PolicyTrial(setup, 1.0, 30.0, seed, name, setting, {"static": {"replicas": 1}})
    return (
        PolicyTrialResult(trial, score, 3.2, mu) if name == contest.PLAN else PolicyTrialResult(trial, score)
    )


def test_policies_are_compared_at_equal_attainment(tmp_path: Path) -> None:
    setup = setup_of(trace(tmp_path), TraceHalf.TUNING)
    seeds = (0, 1)
    table = rank(
        [
            *(result(setup, contest.PLAN, "cheap", hours=3.0, attained=0.95, seed=seed) for seed in seeds),
            *(result(setup, contest.PLAN, "dear", hours=4.0, attained=0.995, seed=seed) for seed in seeds),
            *(result(setup, "predictive", "a", hours=4.4, attained=0.995, seed=seed) for seed in seeds),
            *(result(setup, "predictive", "b", hours=4.0, attained=0.985, seed=seed) for seed in seeds),
            *(result(setup, "static", "a", hours=6.0, attained=0.999, seed=seed) for seed in seeds),
            *(result(setup, "panic_window", "a", hours=3.5, attained=0.9, seed=seed) for seed in seeds),
        ]
    )
    (oracle,) = table.oracles
    # As for policies, a mix of two plans attains any mean of theirs.
    assert oracle.gpu_hours == oracle.plan_gpu_hours == pytest.approx(3 + 8 / 9)
    predictive, static, panic = table.standings
    # Interpolated halfway between its two settings.
    assert predictive.gpu_hours == pytest.approx(4.2)
    assert predictive.oracle_ratio == pytest.approx(4.2 / oracle.gpu_hours)
    assert predictive.lower_ratio == pytest.approx(4.2 / 3.2)
    assert (predictive.setting, predictive.dominated) == ("a", None)
    assert predictive.regret is not None
    split = predictive.regret
    assert (static.dominated, static.oracle_ratio) == (True, pytest.approx(6.0 / oracle.gpu_hours))
    assert split.forecast_s == pytest.approx((4.2 - oracle.gpu_hours) * 3600.0)
    assert (panic.gpu_hours, panic.dominated, panic.attainment, panic.regret) == (None, True, 0.9, None)
    drawn = ET.fromstring(chart("A < B", table, 0.99))  # noqa: S314 - our own
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"A < B", "predictive", "static", "panic window", "start-up time 30 s", "99.9%"} <= set(texts)


def test_policies_are_compared_at_what_a_run_attains_where_none_meets_the_slo(tmp_path: Path) -> None:
    setup = setup_of(trace(tmp_path), TraceHalf.TUNING)
    table = rank(
        [
            result(setup, contest.PLAN, "dear", hours=3.0, attained=0.98818),
            result(setup, contest.PLAN, "cheap", hours=2.0, attained=0.9),
            result(setup, "predictive", "a", hours=3.3, attained=0.98815),
        ]
    )
    assert table.oracles[0].target == 0.9881
    assert table.oracles[0].gpu_hours == pytest.approx(3.0, rel=0.001)
    assert table.standings[0].oracle_ratio == pytest.approx(1.1, rel=0.001)
    # The bound of runs that attain the SLO does not hold for those that miss it.
    assert (table.oracles[0].lower_gpu_hours, table.standings[0].lower_ratio) == (None, None)


@pytest.mark.parametrize(("attained", "target"), [(0.989, 0.989), (0.995, 0.99)])
def test_a_policy_may_attain_what_no_plan_does(attained: float, target: float, tmp_path: Path) -> None:
    setup = setup_of(trace(tmp_path), TraceHalf.TUNING)
    table = rank(
        [
            result(setup, contest.PLAN, "plan", hours=3.0, attained=0.985),
            result(setup, "predictive", "a", hours=3.3, attained=attained),
        ]
    )
    (oracle,), (predictive,) = table
    assert (oracle.target, oracle.plan_gpu_hours) == (target, None)
    # A mix with the plan, which misses more, is cheaper than the run.
    assert 3.0 < oracle.gpu_hours <= 3.3
    assert predictive.gpu_hours == 3.3 and predictive.oracle_ratio == 3.3 / oracle.gpu_hours


def test_the_capacity_is_of_the_cheapest_fluid_plan_that_attains_the_slo_or_of_the_best(
    tmp_path: Path,
) -> None:
    """One seed misses the SLO with all of its fluid plans; spliced plans have no capacity."""
    setup = setup_of(trace(tmp_path), TraceHalf.TUNING)
    plans = {
        0: [(0.5, 4.0, 0.995), (0.6, 3.5, 0.992), (0.7, 3.0, 0.98), (None, 3.2, 0.991)],
        1: [(0.3, 2.0, 0.97), (0.4, 3.0, 0.98), (None, 4.0, 0.999)],
    }
    table = rank(
        [
            result(setup, contest.PLAN, f"{i}", hours=hours, attained=attained, seed=seed, mu=mu)
            for seed, rows in plans.items()
            for i, (mu, hours, attained) in enumerate(rows)
        ]
    )
    assert table.oracles[0].mu == pytest.approx((0.6 + 0.4) / 2)


def test_no_policy_takes_less_than_the_optimum_though_it_takes_less_than_every_plan(tmp_path: Path) -> None:
    setup = setup_of(trace(tmp_path), TraceHalf.TUNING)
    table = rank(
        [
            *(result(setup, contest.PLAN, "plan", hours=4.0, attained=0.995, seed=seed) for seed in (0, 1)),
            # One seed misses the SLO; the mean of both attains it.
            result(setup, "predictive", "a", hours=3.0, attained=0.985, seed=0),
            result(setup, "predictive", "a", hours=3.4, attained=0.995, seed=1),
            *(result(setup, "static", "a", hours=5.0, attained=0.999, seed=seed) for seed in (0, 1)),
        ]
    )
    (oracle,), (predictive, static) = table
    assert (oracle.plan_gpu_hours, oracle.gpu_hours) == (4.0, pytest.approx(3.2))
    assert (predictive.oracle_ratio, static.oracle_ratio) == (1.0, pytest.approx(5.0 / 3.2))
    assert (predictive.least_ratio, predictive.most_ratio) == (1.0, 1.0)
    assert all(each.regret is not None and each.regret.forecast_s >= 0 for each in table.standings)


@pytest.mark.long
def test_trials_have_the_same_result_in_another_process(tmp_path: Path) -> None:
    setup = setup_of(trace(tmp_path, each_s=0.5), TraceHalf.TUNING)
    size = size_of(setup, 30.0)
    assert 7.0 < size.factor * 2.0 / size.mu < 13.0
    assert 0.0 < size.full.kv_used <= 1.0
    plan = contest.PolicyTrial(setup, size.factor, 30.0, 0, contest.PLAN, "", start_mu=size.mu, searched=8)
    policy = contest.PolicyTrial(setup, size.factor, 30.0, 0, "static", "ten", {"static": {"replicas": 10}})
    alone = run_trial(plan), run_trial(policy)
    plans, (fixed,) = alone
    assert 1 <= len(plans) <= 8 and len({each.trial.setting for each in plans}) == len(plans)
    assert max(each.score.attainment for each in plans) > 0.9
    assert 0 < plans[0].lower_hours <= plans[0].score.gpu_hours
    stretch = setup.stretch
    assert fixed.score.gpu_hours == pytest.approx(10 * (stretch.until - stretch.since) / 3600, rel=0.01)
    ended: list[list[PolicyTrialResult]] = []
    assert run_all([policy, plan], 1, ended.append) == [fixed, *plans]
    assert ended == [plans, [fixed]]
