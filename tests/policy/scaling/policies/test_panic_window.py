"""A panic begins at twice the ready capacity, only scales up, and ends a minute after its cause."""

from __future__ import annotations

from policy.scaling.policies.panic_window import PanicWindow
from policy.signals.types import ModelDemand, Rates
from tests.policy.control_play import rates
from tests.policy.scaling.views import START, counts, demand, proposals, view


def knative(**parameters: float) -> PanicWindow:
    """Ten concurrent requests for each replica."""
    return PanicWindow(**({"concurrency": 10.0, "utilisation": 1.0} | parameters))


def in_flight(short: float, stable: float) -> ModelDemand:
    seen = demand(1.0)
    concurrency = Rates(last_6_s=short, last_20_s=stable, last_60_s=stable, last_600_s=stable)
    return ModelDemand(age_s=0.5, arrivals=seen.arrivals, refused=rates(0.0), concurrency=concurrency)


def test_without_a_panic_the_long_window_decides() -> None:
    rows = [(0, in_flight(20, 20)), (5, in_flight(30, 21)), (10, in_flight(35, 31)), (15, in_flight(5, 11))]
    assert counts(knative(), rows) == [2, 3, 4, 2]


def test_a_panic_scales_up_only_until_a_minute_after_its_cause() -> None:
    rows = [
        (0, in_flight(20, 20)),
        (5, in_flight(40, 20)),  # 4 of 2 ready: a panic
        (10, in_flight(90, 40)),  # 9 of 4
        (15, in_flight(170, 60)),  # 17 of 9 are fewer than twice: a scale-up, but no new cause
        (40, in_flight(10, 10)),
        (74, in_flight(10, 10)),
        (76, in_flight(10, 10)),  # over: half at a time
        (81, in_flight(10, 10)),
    ]
    assert counts(knative(), rows) == [2, 4, 9, 17, 17, 17, 8, 4]


def test_a_further_rise_during_a_panic_extends_it() -> None:
    rows = [(0, in_flight(40, 20)), (50, in_flight(70, 20)), (65, in_flight(0, 0)), (111, in_flight(0, 0))]
    assert counts(knative(), rows) == [4, 7, 7, 3]


def test_a_panic_begins_at_twice_the_load_of_the_ready_replicas() -> None:
    seen = view(in_flight(40, 20), count=4, starting_s=(20.0, 20.0))
    proposal = knative().decide(seen, None)
    assert proposal.memory == {"panic_at": START, "most": 4}
    assert knative().decide(view(in_flight(40, 20), count=4), None).memory is None


def test_a_replica_is_filled_to_the_utilisation() -> None:
    [proposal] = proposals(knative(utilisation=0.7), [(0, in_flight(21, 21))])
    assert (proposal.count, proposal.terms) == (3, {"stable": 3.0, "panic": 3.0})


def test_one_decision_changes_the_count_by_bounded_factors() -> None:
    assert counts(knative(up=3.0), [(0, in_flight(20, 110))]) == [6]
    assert counts(knative(down=4.0), [(0, in_flight(0, 0))], count=20, most=30) == [5]


def test_an_idle_model_stays_at_zero_and_a_request_wakes_it() -> None:
    rows = [(0, in_flight(0, 0)), (5, in_flight(1, 0.1))]
    idle = ModelDemand(age_s=0.5, arrivals=rates(0), refused=rates(0), concurrency=rates(0))
    assert counts(knative(), [(0, idle), (5, idle)], count=1, least=0) == [0, 0]
    assert counts(knative(), rows, count=0, least=0) == [1, 1]
