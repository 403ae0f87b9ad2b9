"""Start-up times by path, and the remaining time of current starts."""

from __future__ import annotations

from typing import Any

import pytest

from policy.scaling.reconcile_steps import LayerKey
from policy.scaling.start_times import KEPT, StartTimes
from policy.types import Replica, ReplicaLoad, ReplicaPhase, StartPath

KEY = LayerKey("m", "small", 1)


def replica(name: str, state: ReplicaPhase = ReplicaPhase.STARTING, **over: Any) -> Replica:
    load = ReplicaLoad(at=0.0)
    return Replica(id=name, model="m", shape="small", generation=1, load=load, state=state, **over)


def ready(name: str, start_s: float = 1.0, **over: Any) -> Replica:
    return replica(name, ReplicaPhase.READY, start_s=start_s, **over)


@pytest.mark.parametrize(
    ("requests", "starting_at", "incarnation", "measured_s"),
    [
        ([(1, 100.0)], 103.0, 0, 10.0),
        # Requests that were taken back do not count.
        ([(2, 50.0), (-2, 60.0), (1, 104.0)], 105.0, 0, 6.0),
        # Without a known beginning, and for a restart in place, what the engine reports.
        ([], None, 0, 3.0),
        ([], 0.0, 2, 3.0),
    ],
)
def test_a_start_lasts_from_its_request_to_ready(
    requests: list[tuple[int, float]], starting_at: float | None, incarnation: int, measured_s: float
) -> None:
    starts = StartTimes()
    missing = 0
    for more, at in requests:
        missing += more
        starts.requested(KEY, more, at, missing)
    if starting_at is not None:
        starts.note(replica("a"), starting_at)
    assert starts.note(ready("a", 3.0, incarnation=incarnation), 110.0)
    assert not starts.note(ready("a", 3.0, incarnation=incarnation), 111.0)
    assert starts.lead_s("m", "small", 60.0) == measured_s


def test_a_replica_that_was_ready_when_first_seen_leaves_no_instant_to_the_next_start() -> None:
    starts = StartTimes()
    starts.requested(KEY, 1, 0.0, 1)
    starts.note(ready("a", 3.0), 5.0)
    starts.requested(KEY, 1, 600.0, 1)
    starts.note(replica("b"), 601.0)
    starts.note(ready("b", 3.0), 604.0)
    assert starts.lead_s("m", "small", 60.0) == 4.0


def test_the_quickest_measured_path_counts() -> None:
    starts = StartTimes()
    starts.note(ready("a", 90.0, start_path=StartPath.COLD), 0.0)
    assert starts.lead_s("m", "small", 60.0) == 90.0
    starts.note(ready("b", 20.0, start_path=StartPath.CACHED), 0.0)
    assert starts.lead_s("m", "small", 60.0) == 20.0
    starts.note(ready("c", 2.0, start_path=StartPath.SLEEPING), 0.0)
    assert starts.lead_s("m", "small", 60.0, sleeps=True) == 2.0
    assert starts.lead_s("m", "small", 60.0) == 20.0
    assert starts.lead_s("m", "large", 60.0) == 60.0


def test_the_median_start_counts() -> None:
    starts = StartTimes()
    for i, seconds in enumerate([4.0, 5.0, 60.0, 4.5, 5.5]):
        starts.note(ready(str(i), seconds), 0.0)
    assert starts.lead_s("m", "small", 60.0) == 5.0
    for i in range(KEPT):
        starts.note(ready(f"later-{i}", 9.0), 0.0)
    assert starts.lead_s("m", "small", 60.0) == 9.0


def test_the_remaining_time_of_starts_grows_once_they_are_overdue() -> None:
    starts = StartTimes()
    starts.note(replica("a"), 100.0)
    starts.note(replica("b"), 104.0)
    both = [replica("a"), replica("b")]
    assert starts.remaining_s(both, 10.0, 104.0) == (6.0, 10.0)
    assert starts.remaining_s(both, 10.0, 150.0) == pytest.approx((5.0, 4.6))


def test_measurements_are_saved_and_restored() -> None:
    starts, again = StartTimes(), StartTimes()
    starts.note(ready("a", 7.0, start_path=StartPath.COLD), 0.0)
    again.restore(starts.saved())
    assert again.lead_s("m", "small", 60.0) == 7.0


def test_a_stopped_replica_can_become_ready_again() -> None:
    starts = StartTimes()
    starts.note(ready("a"), 0.0)
    starts.note(replica("a", ReplicaPhase.STOPPED), 1.0)
    assert starts.note(ready("a"), 2.0)
