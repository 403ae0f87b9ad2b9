"""The predicted cost of modes, and when a switch is made or not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.control import ModeSwitchConfig, ScaleConfig, SloConfig
from policy.config.deployment import ResourceBudget
from policy.engine.performance_model import EngineLoad
from policy.engine.prefill_estimate import GENERIC
from policy.engine.replica_capacity import capability
from policy.scaling.budget_resources import Resources
from policy.scaling.decide import ModelPolicies, decide_all, workload_of
from policy.scaling.decision_types import Decision, DecisionMemory, ModeForecast, ModeOverride, Situation
from policy.scaling.forecast import likely
from policy.scaling.policies.registry import choose, make
from policy.scaling.replica_size_mode_selection import ModeComparison, ModeSelection, measured_cost
from policy.scaling.view import Supply
from policy.signals.types import LatencyQuantiles, Rates, Shares, Signals
from tests.policy import control_play as play
from tests.policy.control_play import QUICK, SMALL, Fixed, demand, figures, mode_option, rates, situation

ALL = Resources(math.inf, math.inf, math.inf, math.inf)


def large(**changes: Any) -> Situation:
    """One large replica serves."""
    return situation(**({"mode": play.LARGE.mode, "mode_options": play.BOTH, "slo": QUICK} | changes))


def comparison(given: Situation, rate: float, **changes: Any) -> ModeComparison:
    workload: EngineLoad = workload_of(demand(rate))
    able = {
        one.mode: capability(one.timing, workload, given.slo, error=one.error) for one in given.mode_options
    }
    inputs: dict[str, Any] = {"rate": rate, "during": lambda seconds: rate, "capabilities": able}
    inputs |= {"workload": workload, "reach": ALL, "alone": ALL, "spare": ALL}
    return ModeComparison(situation=given, **(inputs | changes))


def seen(given: Situation, rate: float, **changes: Any) -> Mapping[str, ModeForecast]:
    return comparison(given, rate, **changes).forecasts()


def confirmed(given: Situation, mode: str, seconds: float = 60.0, **memory: Any) -> Situation:
    """``mode`` has had a sufficient gain for ``seconds``."""
    kept = DecisionMemory(better_since={mode: given.at - seconds}, **memory)
    return msgspec.structs.replace(given, memory=kept)


def verdict(given: Situation, rate: float = 7.0, **changes: Any) -> tuple[ModeSelection, str]:
    """The verdict, and the reason given for the other mode."""
    found = comparison(given, rate, **changes).evaluate()
    return found, next(each.why for each in found.mode_forecasts if each.mode != given.mode)


# Outlooks.


def test_a_mode_that_meets_the_slo_costs_its_gpus() -> None:
    there = seen(large(), 2.0)
    assert (there[play.LARGE.mode].count, there[play.LARGE.mode].cost) == (1, 4.0)
    easy = seen(large(slo=SloConfig(ttft_p95_s=10.0)), 2.0)
    assert (easy[SMALL.mode].count, easy[SMALL.mode].cost) == (3, 3.0)


def test_a_mode_that_misses_the_slo_costs_more_than_the_largest_footprint() -> None:
    there = seen(large(), 2.0)
    missed = there[SMALL.mode]
    assert missed.itl_s is not None and missed.itl_s > 0.06
    assert missed.cost == pytest.approx(8 * (1 + (1 - missed.met) + math.log2(missed.itl_s / 0.06)))


@pytest.mark.parametrize("mode", [play.LARGE.mode, SMALL.mode])
def test_measured_and_forecast_costs_agree(mode: str) -> None:
    """The gain of a switch is forecast and measured by one formula."""
    forecast = seen(large(), 2.0)[mode]
    assert forecast.ttft_s is not None and forecast.itl_s is not None
    met = forecast.met
    measured = demand(
        2.0,
        ttft=LatencyQuantiles(count=100, p50=0.0, p90=0.0, p95=forecast.ttft_s, p99=0.0),
        itl=LatencyQuantiles(count=100, p50=0.0, p90=0.0, p95=forecast.itl_s, p99=0.0),
        met=Shares(ttft=1.0, itl=met, both=met),
    )
    given = large(mode=mode, count=forecast.count, signals=Signals(demand=measured))
    found = measured_cost(given)
    assert found is not None
    assert found == (pytest.approx(forecast.cost), met)
    assert (found[0] > 8) == (mode == SMALL.mode)


def test_without_measured_latencies_there_is_no_measured_cost() -> None:
    assert measured_cost(large(signals=Signals())) is None
    assert measured_cost(large(signals=Signals(demand=demand(2.0, ttft=None)))) is None


def test_a_mode_that_cannot_keep_up_costs_by_its_overload() -> None:
    there = seen(large(), 14.0)
    assert there[play.LARGE.mode].ttft_s is None
    edge = capability(play.LARGE.timing, workload_of(demand(1.0)), QUICK).mu_max
    assert there[play.LARGE.mode].cost == pytest.approx(80 * 14.0 / edge)
    # Of two overloaded modes the one with the higher capacity is better.
    assert there[SMALL.mode].ttft_s is None
    assert there[SMALL.mode].cost < there[play.LARGE.mode].cost


def test_without_an_slo_a_mode_is_good_until_it_is_full() -> None:
    plain = large(slo=SloConfig())
    assert seen(plain, 6.0)[play.LARGE.mode].cost == 4.0
    assert seen(plain, 6.0)[SMALL.mode].cost == 7.0
    assert seen(plain, 7.0)[play.LARGE.mode].cost > 8.0


def test_the_cost_is_in_money_with_prices_and_in_cores_without_gpus() -> None:
    priced = tuple(msgspec.structs.replace(option, cost_per_h=2.5 * option.gpus) for option in play.BOTH)
    assert seen(large(mode_options=priced), 2.0)[play.LARGE.mode].cost == 10.0
    cores = tuple(
        mode_option(name, gpus=0, cpus=cpus, of="cpu-smollm2-135m", most=2)
        for name, cpus in (("one", 2), ("two", 1))
    )
    there = seen(situation(mode="one", mode_options=cores), 0.01)
    assert (there["one"].cost, there["two"].cost) == (2.0, 1.0)


def test_an_error_of_the_engine_model_needs_more_replicas() -> None:
    unsure = msgspec.structs.replace(SMALL, error=0.3)
    plain = SloConfig(ttft_p95_s=10.0)
    assert seen(large(slo=plain), 5.0)[SMALL.mode].count == 6
    assert seen(large(slo=plain, mode_options=(play.LARGE, unsure)), 5.0)[SMALL.mode].count == 7


def test_min_healthy_bounds_and_budget_limit_the_count() -> None:
    plain = SloConfig(ttft_p95_s=10.0)
    assert seen(large(slo=plain, scale=ScaleConfig(min_healthy=4)), 1.0)[SMALL.mode].count == 4
    assert seen(large(slo=plain), 5.0, reach=ALL._replace(gpus=3))[SMALL.mode].count == 3
    nothing = seen(large(), 5.0, reach=ALL._replace(gpus=3))[play.LARGE.mode]
    assert nothing.why == "the budget has no room for it"


def test_a_single_request_has_to_meet_the_slo() -> None:
    there = seen(large(slo=SloConfig(itl_p95_s=0.05)), 0.0)
    assert there[SMALL.mode].cost > 8 and there[play.LARGE.mode].cost == 4.0


@pytest.mark.parametrize("model", [None, GENERIC.model])
def test_a_mode_without_an_engine_model_is_not_compared(model: Any) -> None:
    unknown = msgspec.structs.replace(SMALL, timing=msgspec.structs.replace(SMALL.timing, model=model))
    found, why = verdict(confirmed(large(mode_options=(play.LARGE, unknown)), SMALL.mode))
    assert (found.to, why) == (None, "its speed is unknown (no engine model)")
    there = large(mode=SMALL.mode, mode_options=(play.LARGE, unknown))
    found, why = verdict(confirmed(there, play.LARGE.mode), 2.0)
    assert found.to is None and "multi-replica: its speed is unknown" in why


@pytest.mark.slow
@given(
    st.floats(0.01, 50), st.floats(0.01, 50), st.sampled_from([QUICK, SloConfig(), SloConfig(ttft_p95_s=2.0)])
)
def test_more_load_never_costs_less(one: float, other: float, slo: SloConfig) -> None:
    low, high = sorted((one, other))
    for mode in (play.LARGE.mode, SMALL.mode):
        before, after = (seen(large(slo=slo), rate)[mode] for rate in (low, high))
        assert before.count <= after.count
        # A mode that cannot meet the SLO has as many replicas as keep up: one more lowers its miss.
        if before.count == after.count or comparison(large(slo=slo), low).capabilities[mode].mu:
            # Fewer, fuller replicas may meet the SLO as well, within the precision of a prediction.
            assert before.cost <= after.cost * 1.03 + 1e-9


# The rule.


def test_a_gain_has_to_be_confirmed() -> None:
    found, why = verdict(large(), spare=Resources(gpus=8))
    assert found.to is None and "confirmed for 0 of 60 s" in why
    assert found.better_since == {SMALL.mode: play.NOON}
    found, why = verdict(confirmed(large(), SMALL.mode, 59.9))
    assert found.to is None and found.better_since == {SMALL.mode: play.NOON - 59.9}
    found, why = verdict(confirmed(large(), SMALL.mode))
    assert found.to is not None and (found.to.mode, why) == (
        SMALL.mode,
        f"gain {found.gain:.0%}: worth a switch",
    )


def test_a_gain_that_is_too_small_is_not_confirmed() -> None:
    given = confirmed(large(switching=ModeSwitchConfig(gain=0.5)), SMALL.mode, 600)
    found, why = verdict(given, 2.0)
    assert (found.to, found.better_since) == (None, {})
    assert why.endswith("below mode.gain = 50%")


def test_the_dwell_time_after_a_switch() -> None:
    found, why = verdict(confirmed(large(), SMALL.mode, switched_at=play.NOON - 299))
    assert found.to is None and "the mode changed 299 s ago, mode.dwell_s is 300" in why
    assert verdict(confirmed(large(), SMALL.mode, switched_at=play.NOON - 300))[0].to is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settled": False}, "the last decision is not carried out yet"),
        ({"leaving": {SMALL.mode: 1}}, "replicas of multi-replica still drain"),
        ({"supply": Supply(wanted=1, serving=1, draining=1)}, "waits for a scale-down to end"),
        ({"signals": Signals()}, "no gateway has reported"),
    ],
)
def test_no_switch_during_a_change_or_with_stale_metrics(changes: dict[str, Any], reason: str) -> None:
    found, why = verdict(confirmed(large(**changes), SMALL.mode))
    assert found.to is None and reason in why


def test_a_long_start_has_to_pay_off() -> None:
    """From one large replica to three small ones: one GPU of four is saved while the load lasts."""
    slow = msgspec.structs.replace(SMALL, lead_s=600.0)
    there = large(mode_options=(play.LARGE, slow), slo=SloConfig(ttft_p95_s=10.0))
    found, why = verdict(confirmed(there, SMALL.mode), 2.0)
    assert found.to is None and "saves 300 in 300 s, less than the 1800 that the switch costs" in why
    # A gain that lasted half an hour is expected to last another.
    assert verdict(confirmed(there, SMALL.mode, 1801), 2.0)[0].to is not None


def test_during_a_gap_the_queue_has_to_hold_the_requests() -> None:
    """Small replicas on all GPUs miss the SLO, which a large one would meet."""
    gap = msgspec.structs.replace(play.LARGE, gap_s=100.0)
    long_timeout = large(mode=SMALL.mode, count=8, mode_options=(gap, SMALL), queue_s=100.0)
    there = confirmed(long_timeout, play.LARGE.mode, 3600)
    assert verdict(there, 2.0, spare=Resources())[0].to is not None
    short_timeout = msgspec.structs.replace(there, queue_s=99.0)
    found, why = verdict(short_timeout, 2.0, spare=Resources())
    assert (
        found.to is None
        and "0.00 of 2.00 req/s can be served during the switch: others wait for 100 s" in why
    )
    # The cost of a gap counts, too: a gain of a minute or two does not justify one.
    shortly = msgspec.structs.replace(
        there, memory=DecisionMemory(better_since={play.LARGE.mode: play.NOON - 60})
    )
    assert "that the switch costs" in verdict(shortly, 2.0, spare=Resources())[1]


def test_the_drain_of_a_switch_is_part_of_its_gap() -> None:
    gap = msgspec.structs.replace(play.LARGE, gap_s=40.0)
    there = confirmed(
        large(mode=SMALL.mode, count=8, mode_options=(gap, SMALL), queue_s=100.0), play.LARGE.mode, 3600
    )

    def why(drain_s: float, rate: float = 2.0) -> str:
        signals = msgspec.structs.replace(there.signals, demand=demand(rate, drain_s=drain_s))
        return verdict(msgspec.structs.replace(there, signals=signals), rate, spare=Resources())[1]

    assert "worth a switch" in why(60.0)
    assert "others wait for 101 s" in why(61.0)
    # No stream runs longer than the drain timeout.
    longest_s = there.switching.drain_timeout_s
    assert f"others wait for {40 + longest_s:.0f} s" in why(10 * longest_s)


def test_an_overloaded_mode_may_queue_requests_during_the_switch() -> None:
    there = confirmed(large(), SMALL.mode)
    assert verdict(there, 7.5, spare=Resources(gpus=4))[0].to is not None
    short_timeout = msgspec.structs.replace(there, queue_s=5.0)
    found, why = verdict(short_timeout, 7.5, spare=Resources(gpus=4))
    assert found.to is None and "can be served during the switch" in why


def test_the_peak_during_a_switch_is_independent_of_the_forecast() -> None:
    """No replica serves for 100 s, longer than a start in the present mode."""
    gap = msgspec.structs.replace(play.LARGE, gap_s=100.0)
    there = confirmed(
        large(mode=SMALL.mode, count=8, mode_options=(gap, SMALL), queue_s=99.0), play.LARGE.mode, 3600
    )
    asked: list[float] = []

    def during(seconds: float) -> float:
        asked.append(seconds)
        return 6.0

    assert "0.00 of 6.00 req/s" in verdict(there, 2.0, spare=Resources(), during=during)[1]
    assert asked == [100.0]
    # As a decision: the rate rises, and a policy without a forecast reports the recent rate.
    rising = Rates(last_6_s=2.0, last_20_s=2.0, last_60_s=2.0, last_600_s=1.0)
    signals = Signals(demand=demand(2.0, arrivals=rising), replicas=figures(8))
    supply = Supply(wanted=8, serving=8)
    decision, _ = decided(
        msgspec.structs.replace(there, signals=signals, supply=supply), 8, ResourceBudget(gpus=8)
    )
    why = next(seen.why for seen in decision.mode_forecasts if seen.mode == play.LARGE.mode)
    assert f"0.00 of {likely(rising, 100.0, 0.95):.2f} req/s can be served during the switch" in why


def test_the_cheapest_mode_is_chosen() -> None:
    tiny = mode_option("tiny", gpus=1, most=8)
    wide = mode_option("wide", gpus=2, most=4)
    there = large(mode_options=(play.LARGE, wide, tiny), slo=SloConfig())
    there = msgspec.structs.replace(
        there, memory=DecisionMemory(better_since={"wide": play.NOON - 90, "tiny": play.NOON - 90})
    )
    found = comparison(there, 1.0).evaluate()
    reasons = {each.mode: each.why for each in found.mode_forecasts}
    assert found.to is not None
    other = {"wide", "tiny"} - {found.to.mode}
    assert reasons[other.pop()].endswith(f"{found.to.mode} costs less")


# As a decision.


def decided(
    there: Situation, count: int = 1, budget: ResourceBudget | None = None
) -> tuple[Decision, DecisionMemory]:
    policies = {there.model: ModelPolicies(Fixed(count))}
    return decide_all({there.model: there}, budget or ResourceBudget(), policies)[there.model]


def overloaded(**changes: Any) -> Situation:
    signals = Signals(demand=demand(7.5), replicas=figures(1))
    return confirmed(large(signals=signals, **changes), SMALL.mode)


def test_a_switch_states_its_gain_and_resets_the_memory() -> None:
    decision, memory = decided(overloaded(), budget=ResourceBudget(gpus=12))
    assert (decision.was_mode, decision.mode, decision.count) == (play.LARGE.mode, SMALL.mode, 8)
    assert decision.gain is not None and decision.gain > 0.15
    text = "multi-replica is predicted to keep up with the load, which single-large cannot"
    assert decision.reason == f"{text}, for 2 times the GPUs (4 -> 8)"
    assert (memory.switched_at, memory.better_since, memory.low_since) == (play.NOON, {}, {})


def test_a_model_at_zero_does_not_switch() -> None:
    quiet = demand(0.0, idle_s=900.0, concurrency=rates(0.0))
    small = msgspec.structs.replace(SMALL, least=0)
    for count in (0, 1):
        signals = Signals(demand=quiet, replicas=figures(count, running=0))
        there = large(count=count, signals=signals, slo=SloConfig(), scale=ScaleConfig(zero_after_s=300.0))
        there = msgspec.structs.replace(
            there, mode_options=(msgspec.structs.replace(play.LARGE, least=0), small)
        )
        there = confirmed(
            msgspec.structs.replace(there, supply=Supply(wanted=count, serving=count)), SMALL.mode
        )
        assert verdict(there, 0.0)[0].to is not None
        decision, _ = decided(there)
        assert (decision.mode, decision.count) == (play.LARGE.mode, 0)


def test_a_dry_run_starts_no_dwell_time() -> None:
    given = overloaded()
    guard = msgspec.structs.replace(given.guard, dry_run=True)
    decision, memory = decided(msgspec.structs.replace(given, guard=guard))
    assert decision.dry_run and decision.mode == SMALL.mode
    assert (memory.switched_at, memory.better_since) == (None, {SMALL.mode: play.NOON - 60})


def test_a_manual_mode_is_kept() -> None:
    pinned = ModeOverride(mode=play.LARGE.mode)
    decision, _ = decided(overloaded(override=pinned))
    assert (decision.mode, decision.gain) == (play.LARGE.mode, None)
    assert "multi-replica is predicted to" in decision.reason and "mode is set manually" in decision.reason


def test_a_manual_mode_is_switched_to_at_once() -> None:
    signals = Signals(demand=demand(2.0), replicas=figures(1))
    switch = ModeOverride(mode=SMALL.mode)
    unsettled = large(
        signals=signals, settled=False, override=switch, memory=DecisionMemory(switched_at=play.NOON - 1)
    )
    decision, memory = decided(unsettled)
    # Small replicas cannot meet the SLO: as many as keep up are wanted.
    assert (decision.mode, decision.count, decision.gain) == (SMALL.mode, 3, None)
    assert memory.switched_at == play.NOON
    counted = msgspec.structs.replace(unsettled, override=ModeOverride(mode=SMALL.mode, count=3))
    decision, _ = decided(counted)
    assert (decision.mode, decision.count) == (SMALL.mode, 3)


def test_a_manual_switch_without_metrics_keeps_the_capacity() -> None:
    signals = Signals(replicas=figures(6))
    wide = mode_option("wide", gpus=2, most=8)
    there = situation(
        count=6, mode_options=(SMALL, wide), signals=signals, override=ModeOverride(mode="wide")
    )
    decision, _ = decided(there, 6)
    workload = workload_of(None)
    one, other = (capability(each.timing, workload, SloConfig()).mu for each in (SMALL, wide))
    assert (decision.mode, decision.count) == ("wide", math.ceil(6 * one / other))
    assert decision.count > 1


def test_a_fixed_policy_does_not_change_the_mode() -> None:
    given = overloaded()
    policies = {given.model: ModelPolicies(make(choose("policy", "static")))}
    decision, memory = decide_all({given.model: given}, ResourceBudget(gpus=12), policies)[given.model]
    assert (decision.mode, decision.gain, memory.better_since) == (play.LARGE.mode, None, {})
    other = next(seen for seen in decision.mode_forecasts if seen.mode == SMALL.mode)
    assert (other.count, other.why) == (8, "the policy does not change modes")
    by_hand = msgspec.structs.replace(given, override=ModeOverride(mode=SMALL.mode))
    decision, _ = decide_all({given.model: by_hand}, ResourceBudget(gpus=12), policies)[given.model]
    assert decision.mode == SMALL.mode


def test_a_mode_that_no_longer_fits_the_budget_is_left() -> None:
    """A large replica exceeds the power budget: it stays until small ones replace it."""
    above_power_budget = msgspec.structs.replace(play.LARGE, watts=2560.0)
    small = msgspec.structs.replace(SMALL, watts=300.0)
    signals = Signals(demand=demand(1.0), replicas=figures(1))
    there = large(slo=SloConfig(), mode_options=(above_power_budget, small), signals=signals)
    decision, memory = decided(there, budget=ResourceBudget(watts=2500))
    assert (decision.mode, decision.count) == (play.LARGE.mode, 1)
    assert memory.better_since == {SMALL.mode: play.NOON}
    decision, _ = decided(confirmed(there, SMALL.mode), budget=ResourceBudget(watts=2500))
    assert (decision.mode, decision.count) == (SMALL.mode, 2)


def test_a_manual_mode_waits_for_the_budget() -> None:
    signals = Signals(demand=demand(2.0), replicas=figures(2))
    there = situation(
        count=2, mode_options=play.BOTH, signals=signals, override=ModeOverride(mode=play.LARGE.mode)
    )
    decision, _ = decided(there, 2, ResourceBudget(gpus=3))
    assert (decision.mode, decision.count) == (SMALL.mode, 2)
    assert "switch to single-large waits: it needs 1, the budget leaves 0" in decision.reason
