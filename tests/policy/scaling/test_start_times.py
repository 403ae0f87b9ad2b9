"""How long starts take, by path, and when those that go on will be over."""

from __future__ import annotations

from typing import Any

import pytest

from policy.scaling.rollout import LayerKey
from policy.scaling.start_times import KEPT, StartTimes
from policy.types import Load, Replica, ReplicaPhase, StartPath

KEY = LayerKey("m", "small", 1)


def replica(name: str, state: ReplicaPhase = ReplicaPhase.STARTING, **over: Any) -> Replica:
    fields: dict[str, Any] = {
        "id": name,
        "model": "m",
        "shape": "small",
        "generation": 1,
        "load": Load(at=0.0),
    }
    return Replica(state=state, **fields | over)


def ready(name: str, start_s: float = 1.0, **over: Any) -> Replica:
    return replica(name, ReplicaPhase.READY, start_s=start_s, **over)


def test_a_start_lasts_from_when_it_was_asked_for() -> None:
    starts = StartTimes()
    starts.requested(KEY, 1, 100.0)
    starts.note(replica("a"), 103.0)
    assert starts.note(ready("a"), 108.0)
    assert starts.lead_s("m", "small", 60.0) == 8.0


def test_of_one_that_was_ready_before_only_its_own_measure_is_known() -> None:
    starts = StartTimes()
    assert starts.note(ready("a", 3.0), 500.0)
    assert not starts.note(ready("a", 3.0), 501.0)
    assert starts.lead_s("m", "small", 60.0) == 3.0


def test_an_engine_that_was_restarted_in_place_took_what_it_says() -> None:
    starts = StartTimes()
    starts.note(replica("a"), 0.0)
    starts.note(ready("a", 3.0, incarnation=2), 50.0)
    assert starts.lead_s("m", "small", 60.0) == 3.0


def test_paths_are_measured_apart_and_the_quickest_is_at_hand() -> None:
    starts = StartTimes()
    starts.note(ready("a", 90.0, start_path=StartPath.COLD), 0.0)
    assert starts.lead_s("m", "small", 60.0) == 90.0
    starts.note(ready("b", 20.0, start_path=StartPath.CACHED), 0.0)
    assert starts.lead_s("m", "small", 60.0) == 20.0
    starts.note(ready("c", 2.0, start_path=StartPath.SLEEPING), 0.0)
    assert starts.lead_s("m", "small", 60.0, sleeps=True) == 2.0
    # What must be started is not woken.
    assert starts.lead_s("m", "small", 60.0) == 20.0
    assert starts.lead_s("m", "large", 60.0) == 60.0


def test_one_slow_start_is_not_taken_for_all() -> None:
    starts = StartTimes()
    for i, seconds in enumerate([4.0, 5.0, 60.0, 4.5, 5.5]):
        starts.note(ready(str(i), seconds), 0.0)
    assert starts.lead_s("m", "small", 60.0) == 5.0
    for i in range(KEPT):
        starts.note(ready(f"later-{i}", 9.0), 0.0)
    assert starts.lead_s("m", "small", 60.0) == 9.0


def test_what_starts_is_over_when_it_usually_is_and_later_when_it_is_overdue() -> None:
    starts = StartTimes()
    starts.note(replica("a"), 100.0)
    starts.note(replica("b"), 104.0)
    both = [replica("a"), replica("b")]
    assert starts.remaining_s(both, 10.0, 104.0) == (6.0, 10.0)
    assert starts.remaining_s(both, 10.0, 150.0) == pytest.approx((5.0, 4.6))


def test_what_was_asked_for_and_taken_back_is_no_start() -> None:
    starts = StartTimes()
    starts.requested(KEY, 2, 100.0)
    starts.requested(KEY, -2, 105.0)
    starts.requested(KEY, 1, 200.0)
    starts.note(replica("a"), 202.0)
    starts.note(ready("a"), 210.0)
    assert starts.lead_s("m", "small", 60.0) == 10.0


def test_measures_outlive_the_controller() -> None:
    starts, again = StartTimes(), StartTimes()
    starts.note(ready("a", 7.0, start_path=StartPath.COLD), 0.0)
    again.restore(starts.saved())
    assert again.lead_s("m", "small", 60.0) == 7.0


def test_one_that_stopped_and_comes_back_starts_anew() -> None:
    starts = StartTimes()
    starts.note(ready("a"), 0.0)
    starts.note(replica("a", ReplicaPhase.STOPPED), 1.0)
    assert starts.note(ready("a"), 2.0)
