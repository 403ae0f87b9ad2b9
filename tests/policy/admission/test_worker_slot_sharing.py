"""Workers of a host leave slots to each other: by their shares, and not for long if nobody takes them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.admission.worker_slot_sharing import LEFT_S, UNWANTED_S, YieldedSlots, has_fair_share
from policy.routing.cost import Candidate

COUNT = st.integers(0, 50)


@given(COUNT, COUNT, COUNT, COUNT, st.booleans())
def test_only_one_yields(running: int, waiting: int, theirs: int, waiting_there: int, was_last: bool) -> None:
    here = has_fair_share(running, waiting + 1, theirs, waiting_there + 1, was_last=was_last)
    there = has_fair_share(theirs, waiting_there + 1, running, waiting + 1, was_last=not was_last)
    assert not (here and there)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_slots_are_shared_with_a_worker_whose_requests_wait(slots: int) -> None:
    """One worker has all slots, and each becomes free in turn; a served client sends its next request."""
    running, waiting, last = [slots, 0], [2, 10], 0
    served: Counter[int] = Counter()
    for turn in range(30 * slots):
        ends = turn % 2 if all(running) else 0 if running[0] else 1
        running[ends] -= 1
        waiting[ends] += 1
        part = (running[ends], waiting[ends], running[1 - ends], waiting[1 - ends])
        takes = 1 - ends if has_fair_share(*part, was_last=last == ends) else ends
        running[takes] += 1
        waiting[takes] -= 1
        last = takes
        served[takes] += 1
    # Its share, or at least every other slot.
    assert served[1] >= 0.45 * served.total()


def test_a_worker_yields_nothing_while_others_have_no_queue() -> None:
    assert not has_fair_share(2, 3, 1, 0, was_last=True)


def test_a_slot_that_the_others_do_not_take_is_left_for_a_short_time_only() -> None:
    left, replica = YieldedSlots(), Candidate("r", 1, bound=2)
    taken = LEFT_S + 0.01
    assert [left.leaves(replica, 0, 0, at) for at in (0.0, 0.02, 0.04, taken)] == [True, True, True, False]
    replica.begun = 1  # this worker takes it, and soon the next one
    assert not left.leaves(replica, 0, 0, taken + UNWANTED_S / 2)
    assert left.leaves(replica, 0, 0, taken + UNWANTED_S + 0.01)


def test_a_slot_that_was_left_in_vain_is_left_to_a_critical_request_that_comes_later() -> None:
    """For a second batch requests took every slot before it."""
    left, replica = YieldedSlots(), Candidate("r", 1, bound=2)
    taken = LEFT_S + 0.01
    assert [left.leaves(replica, 0, 3, at) for at in (0.0, 0.04, taken)] == [True, True, False]
    replica.begun = 1
    came = taken + 0.02
    assert not left.leaves(replica, 0, 3, came)
    assert left.leaves(replica, 0, 4, came)
    # Nor is it idle for longer if that one cannot use it.
    looks = (came + LEFT_S - 0.01, came + LEFT_S + 0.01)
    assert [left.leaves(replica, 0, 4, at) for at in looks] == [True, False]


def test_slots_are_left_to_the_others_as_long_as_they_take_them() -> None:
    left, replica = YieldedSlots(), Candidate("r", 1, bound=2)
    for i in range(200):
        replica.begun = i // 2  # by another worker, every 40 ms
        assert left.leaves(replica, i // 2, 0, i * 0.02)


def test_a_slot_that_is_free_long_after_the_last_is_left_again() -> None:
    left, replica = YieldedSlots(), Candidate("r", 1, bound=2)
    assert left.leaves(replica, 0, 0, 0.0)
    assert left.leaves(replica, 0, 0, 5.0)
