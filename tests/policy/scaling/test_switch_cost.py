"""What a switch of mode takes from requests: beside, by halves, in a gap and on shared cores; and queues."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.scaling.budget_resources import Resources
from policy.scaling.decision_types import ModeOption, Situation
from policy.scaling.replica_size_mode_selection import ModeSelection
from policy.scaling.switch_cost import (
    Capacities,
    ModeSwitch,
    SwitchPhase,
    core_share,
    describe_gain,
    switch_cost,
)
from policy.scaling.view import Supply
from policy.signals.types import Signals
from tests.policy.control_play import LARGE, NOON, SMALL, demand, figures, mode_option
from tests.policy.scaling.test_replica_size_mode_selection import comparison, confirmed, large

NO_BOUND = Resources(math.inf, math.inf, math.inf, math.inf)


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (0.584, "gain 58%"),
        (-0.001, "gain 0%"),
        (-0.5, "costs 50% more"),
        (-6.44, "costs 7.4 times as much"),
    ],
)
def test_a_mode_that_costs_more_is_not_said_to_gain(gain: float, text: str) -> None:
    assert describe_gain(gain) == text


def on_cores(name: str, cpus: int) -> ModeOption:
    return mode_option(name, gpus=0, cpus=cpus, of="cpu-smollm2-135m", most=2, lead_s=40.0)


def switch(old: ModeOption, new: ModeOption, serving: int, count: int, **changes: Any) -> ModeSwitch:
    given = {"bounds": NO_BOUND, "min_healthy": 1, "drain_s": 10.0} | changes
    return ModeSwitch(old=old, new=new, serving=serving, target=count, **given)


# One large replica to four small ones, by the bounds on what the model may hold.
PHASES = [
    # With room, the new ones start first: nothing is lost.
    (switch(LARGE, SMALL, 1, 4), [SwitchPhase(30.0, 1, 0), SwitchPhase(10.0, 0, 4, draining=1)], 0.0),
    # Room for half: two start, then the large one drains, then the rest starts.
    (
        switch(LARGE, SMALL, 1, 4, bounds=NO_BOUND._replace(gpus=6)),
        [SwitchPhase(30.0, 1, 0), SwitchPhase(10.0, 0, 2, draining=1), SwitchPhase(30.0, 0, 2)],
        0.0,
    ),
    # Without room all wait.
    (switch(LARGE, SMALL, 1, 4, gap_s=13.0), [SwitchPhase(13.0, 0, 0)], 13.0),
    # On two cores: two starts take two of four threads and twice as long, then one engine drains beside two.
    (
        switch(on_cores("large", 2), on_cores("small", 1), 1, 2, bounds=NO_BOUND._replace(cpus=2)),
        [SwitchPhase(80.0, 1, 0, 0.5), SwitchPhase(10.0, 0, 2, 0.5, 1)],
        45.0,
    ),
    # A start of one thread beside two.
    (
        switch(on_cores("small", 1), on_cores("large", 2), 2, 1, bounds=NO_BOUND._replace(cpus=2)),
        [SwitchPhase(60.0, 2, 0, pytest.approx(2 / 3)), SwitchPhase(10.0, 0, 1, 0.5, 2)],
        60.0 / 3 + 5.0,
    ),
    # On four cores nothing is shared.
    (
        switch(on_cores("large", 2), on_cores("small", 1), 1, 2, bounds=NO_BOUND._replace(cpus=4)),
        [SwitchPhase(40.0, 1, 0), SwitchPhase(10.0, 0, 2, draining=1)],
        0.0,
    ),
]


@pytest.mark.parametrize(("made", "phases", "taken_s"), PHASES)
def test_each_kind_of_switch_takes_what_its_phases_lose(
    made: ModeSwitch, phases: list[SwitchPhase], taken_s: float
) -> None:
    assert made.phases() == phases
    capacities = Capacities(old=2.0 / made.serving, new=2.0 / made.target, rate=1.0)
    cost = switch_cost(made, Signals(demand=demand(1.0)), capacities, 0)
    assert cost.taken_s == pytest.approx(taken_s)
    assert cost.lasts_s == sum(phase.seconds for phase in phases)
    assert cost.speed == min(phase.speed for phase in made.phases())


def test_less_capacity_than_the_rate_makes_requests_wait() -> None:
    made = switch(LARGE, SMALL, 1, 4, bounds=NO_BOUND._replace(gpus=6))
    cost = switch_cost(made, Signals(demand=demand(2.0)), Capacities(old=2.0, new=0.5, rate=2.0), 0)
    # While the large one drains, half of it and two small ones serve all; then only those two serve.
    assert cost.taken_s == pytest.approx(30.0 * 0.5)
    # The drain between the two starts is none.
    assert (cost.start_s, cost.lasts_s) == (60.0, 70.0)


def test_without_requests_a_switch_takes_nothing() -> None:
    gap = switch(LARGE, SMALL, 1, 4, gap_s=13.0)
    assert switch_cost(gap, Signals(demand=demand(0.0)), Capacities(2.0, 0.5, 0.0), 0).taken_s == 0.0
    assert switch_cost(gap, Signals(), Capacities(2.0, 0.5, 0.0), 0).taken_s == 0.0


def test_cached_prompts_are_computed_again() -> None:
    made = switch(LARGE, SMALL, 1, 4)
    cold = Signals(demand=demand(1.0))
    warm = Signals(demand=demand(1.0, hit=0.9))

    def refill_s(signals: Signals, kv_tokens: int) -> float:
        cost = switch_cost(made, signals, Capacities(2.0, 0.5, 1.0), kv_tokens)
        assert cost.taken_s == cost.refill_s
        return cost.refill_s

    assert refill_s(cold, 100_000) == 0.0
    # Three requests of 900 cached tokens each, on four replicas.
    limits, model = SMALL.timing.limits, SMALL.timing.model
    assert model is not None
    chunk = limits.max_num_batched_tokens
    expected = 3 * 900 / chunk * model.step_time(chunk, 0.0, 1.0) / 4
    assert refill_s(warm, 0) == refill_s(warm, 100_000) == pytest.approx(expected)
    # No more than the caches of the old replicas hold.
    assert refill_s(warm, 270) == pytest.approx(expected / 10)


@given(st.floats(0, 64), st.floats(0.1, 64))
def test_engines_share_cores_evenly(cores: float, claimed: float) -> None:
    share = core_share(cores, claimed)
    assert 0 <= share <= 1 and share * claimed <= cores + 1e-9
    assert core_share(cores, 0.0) == 1.0


# Queues.


def test_a_queue_clears_by_the_surplus_of_each_phase() -> None:
    capacities = Capacities(old=3.0, new=2.0, rate=2.0)
    assert capacities.clears_s(10, [], 3.0) == 10.0
    assert capacities.clears_s(10, [], 2.0) == math.inf
    gap = [SwitchPhase(5.0, 0, 0)]
    # 10 wait, 10 more arrive in the gap; then two more are served than arrive.
    assert capacities.clears_s(10, gap, 4.0) == 15.0
    assert capacities.clears_s(10, [SwitchPhase(5.0, 1, 0), *gap], 4.0) == pytest.approx(5 + 5 + 15 / 2)
    assert capacities.clears_s(4, [SwitchPhase(5.0, 1, 0), *gap], 4.0) == 4.0


def queued(count: int, rate: float, *, gap_s: float = 20.0, **memory: Any) -> Situation:
    """Eight small replicas that miss the SLO, which one large replica would meet after a gap."""
    gap = msgspec.structs.replace(LARGE, gap_s=gap_s, lead_s=gap_s)
    signals = Signals(demand=demand(rate, queued=count), replicas=figures(8))
    there = large(mode=SMALL.mode, count=8, mode_options=(gap, SMALL), signals=signals, queue_s=300.0)
    there = msgspec.structs.replace(there, supply=Supply(wanted=8, serving=8))
    return confirmed(there, LARGE.mode, 3600, **memory)


def judged(given: Situation, rate: float) -> tuple[ModeSelection, str]:
    found = comparison(given, rate, spare=Resources()).evaluate()
    return found, next(each.why for each in found.mode_forecasts if each.mode != given.mode)


def test_a_switch_waits_for_a_queue_that_clears_sooner_without_it() -> None:
    found, why = judged(queued(60, 2.0), 2.0)
    assert found.to is None and found.queue_clears_by is not None and found.queue_clears_by > NOON + 5
    clears_s = found.queue_clears_by - NOON
    assert f"the queue of 60 clears in {clears_s:.0f} s in the present mode" in why
    assert why.endswith("s with a switch")
    # Without the queue, or with one that ends before the next decision, it is made.
    assert judged(queued(0, 2.0), 2.0)[0].to is not None
    assert judged(queued(3, 2.0), 2.0)[0].to is not None


def test_a_prediction_that_failed_does_not_hold_a_switch() -> None:
    first, _ = judged(queued(60, 2.0), 2.0)
    assert first.queue_clears_by is not None
    held = judged(queued(60, 2.0, queue_clears_by=NOON + 0.5), 2.0)[0]
    assert (held.to, held.queue_clears_by) == (None, NOON + 0.5)
    late = judged(queued(60, 2.0, queue_clears_by=NOON), 2.0)[0]
    assert late.to is not None and late.queue_clears_by == NOON


@given(st.integers(0, 200), st.floats(0.2, 6.0), st.floats(1.0, 60.0))
def test_no_switch_begins_while_a_queue_clears_sooner_without_it(
    count: int, rate: float, gap_s: float
) -> None:
    found, _ = judged(queued(count, rate, gap_s=gap_s), rate)
    cost = next(each.switch for each in found.mode_forecasts if each.switch is not None)
    if found.to is not None and cost.clears_s is not None and cost.clears_s > 5.0:
        assert cost.clears_after_s is not None and cost.clears_after_s <= cost.clears_s
    # Nothing else than the queue differs from the same load without one.
    if found.queue_clears_by is None and count:
        without = msgspec.structs.replace(
            queued(count, rate, gap_s=gap_s), signals=Signals(demand=demand(rate), replicas=figures(8))
        )
        assert (found.to is None) == (judged(without, rate)[0].to is None)


@given(st.integers(5, 500))
def test_a_queue_that_the_present_mode_never_clears_holds_no_switch(count: int) -> None:
    """One large replica is overloaded at 8 requests/s, eight small ones serve more."""
    signals = Signals(demand=demand(8.0, queued=count), replicas=figures(1))
    there = confirmed(large(signals=signals), SMALL.mode, 600.0)
    found = comparison(there, 8.0).evaluate()
    cost = next(each.switch for each in found.mode_forecasts if each.switch is not None)
    assert cost.clears_s is None and found.queue_clears_by is None
    assert found.to is not None and found.to.mode == SMALL.mode
