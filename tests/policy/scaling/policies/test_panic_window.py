"""A panic begins at twice what is ready, only adds, and ends a minute after its cause."""

from __future__ import annotations

from policy.scaling.policies.panic_window import PanicWindow
from policy.signals.types import Demand, Rates
from tests.policy.control_play import rates
from tests.policy.scaling.views import START, counts, demand, proposals, view


def knative(**parameters: float) -> PanicWindow:
    """Ten requests at once for each."""
    return PanicWindow(**({"concurrency": 10.0, "utilisation": 1.0} | parameters))


def at_once(short: float, stable: float) -> Demand:
    seen = demand(1.0)
    concurrency = Rates(last_6_s=short, last_20_s=stable, last_60_s=stable, last_600_s=stable)
    return Demand(age_s=0.5, arrivals=seen.arrivals, refused=rates(0.0), concurrency=concurrency)


def test_without_a_panic_the_long_window_decides() -> None:
    rows = [(0, at_once(20, 20)), (5, at_once(30, 21)), (10, at_once(35, 31)), (15, at_once(5, 11))]
    assert counts(knative(), rows) == [2, 3, 4, 2]


def test_a_panic_adds_at_once_and_takes_nothing_until_a_minute_after_its_cause() -> None:
    rows = [
        (0, at_once(20, 20)),
        (5, at_once(40, 20)),  # 4 of 2 ready: a panic
        (10, at_once(90, 40)),  # 9 of 4
        (15, at_once(170, 60)),  # 17 of 9 are fewer than twice: more, but no new cause
        (40, at_once(10, 10)),
        (74, at_once(10, 10)),
        (76, at_once(10, 10)),  # over: half at a time
        (81, at_once(10, 10)),
    ]
    assert counts(knative(), rows) == [2, 4, 9, 17, 17, 17, 8, 4]


def test_more_in_a_panic_makes_it_last() -> None:
    rows = [(0, at_once(40, 20)), (50, at_once(70, 20)), (65, at_once(0, 0)), (111, at_once(0, 0))]
    assert counts(knative(), rows) == [4, 7, 7, 3]


def test_a_panic_is_measured_by_what_is_ready() -> None:
    seen = view(at_once(40, 20), count=4, starting_s=(20.0, 20.0))
    proposal = knative().decide(seen, None)
    assert proposal.memory == {"panic_at": START, "most": 4}
    assert knative().decide(view(at_once(40, 20), count=4), None).memory is None


def test_a_replica_is_filled_to_the_utilisation() -> None:
    [proposal] = proposals(knative(utilisation=0.7), [(0, at_once(21, 21))])
    assert (proposal.count, proposal.terms) == (3, {"stable": 3.0, "panic": 3.0})


def test_one_decision_goes_no_further_than_its_bounds() -> None:
    assert counts(knative(up=3.0), [(0, at_once(20, 110))]) == [6]
    assert counts(knative(down=4.0), [(0, at_once(0, 0))], count=20, most=30) == [5]


def test_it_lets_go_of_the_last_and_wakes_the_first() -> None:
    rows = [(0, at_once(0, 0)), (5, at_once(1, 0.1))]
    idle = Demand(age_s=0.5, arrivals=rates(0), refused=rates(0), concurrency=rates(0))
    assert counts(knative(), [(0, idle), (5, idle)], count=1, least=0) == [0, 0]
    assert counts(knative(), rows, count=0, least=0) == [1, 1]
