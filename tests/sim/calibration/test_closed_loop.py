"""What clients in a closed loop see of an engine, by hand where that can be counted."""

from __future__ import annotations

import pytest

from policy.engine.model import EngineModel, Limits
from sim.calibration.load_points import Point, closed_loop

# A step takes a second, whatever is in it.
CLOCK = EngineModel(o=1.0, w=0.0, c=0.0, g=0.0, r=0.0)
LIMITS = Limits(max_num_batched_tokens=100, max_num_seqs=8, kv_tokens=10_000)


def test_one_client_sees_its_own_steps() -> None:
    found = closed_loop(CLOCK, LIMITS, Point(1, 50, 4), 12.0)
    assert [tuple(each) for each in found] == [(1.0, 1.0)] * 3


def test_a_prompt_of_several_steps_takes_as_many() -> None:
    (found,) = closed_loop(CLOCK, LIMITS, Point(1, 250, 2), 4.0)
    assert found.ttft_s == 3.0


def test_the_way_is_in_the_time_to_the_first_token_and_makes_the_next_miss_a_step() -> None:
    one = closed_loop(CLOCK, LIMITS, Point(1, 50, 2), 10.0, path_s=0.2)
    # 2 s and 0.2 s each, the last of which is over before the end.
    assert len(one) == 4
    assert {round(each.ttft_s, 9) for each in one} == {1.2}
    # Beside another, whose step goes on meanwhile, one waits for that first.
    two = closed_loop(CLOCK, LIMITS, Point(2, 90, 3), 20.0, path_s=0.2)
    assert [each.ttft_s for each in two[2:]] == pytest.approx([2.0] * len(two[2:]), abs=0.01)


def test_an_idle_engine_begins_with_the_first_of_those_that_come_together() -> None:
    found = closed_loop(CLOCK, LIMITS, Point(2, 20, 1), 2.5)
    assert [each.ttft_s for each in found[:2]] == pytest.approx([1.0, 2.0], abs=0.01)


def test_what_ends_after_the_end_does_not_count() -> None:
    assert closed_loop(CLOCK, LIMITS, Point(1, 50, 4), 3.9) == []


def test_an_answer_of_one_token_has_no_gap() -> None:
    assert {each.itl_s for each in closed_loop(CLOCK, LIMITS, Point(1, 50, 1), 3.0)} == {0.0}
