"""When to add what: a timeline of modules."""

from __future__ import annotations

import itertools
import math

import pytest

from sim.planning.result import WEEKS_PER_MONTH, Need, schedule

NEEDS = (Need(1.0, 6), Need(2.0, 12), Need(4.0, 24))


def test_devices_are_there_when_the_load_outgrows_what_is_owned() -> None:
    steps = schedule(NEEDS, growth=0.1, module=8, lead_weeks=4)
    assert [(step.modules, step.devices) for step in steps] == [(1, 8), (1, 16), (1, 24)]
    # 8 devices carry a factor of 8/6, 16 one of 16/6: here devices grow with the load.
    assert [step.factor for step in steps] == pytest.approx([1.0, 8 / 6, 16 / 6])
    for step in steps:
        assert math.pow(1.1, step.month) == pytest.approx(step.factor)
        assert step.month - step.order_month == pytest.approx(4 / WEEKS_PER_MONTH)


def test_what_is_needed_today_comes_first_and_should_have_been_ordered() -> None:
    first = schedule((Need(1.0, 20),), growth=0.1, module=8, lead_weeks=4)
    assert [(step.month, step.modules, step.devices) for step in first] == [(0.0, 3, 24)]
    assert first[0].order_month < 0


def test_faster_growth_adds_the_same_sooner() -> None:
    slow, fast = (schedule(NEEDS, growth=growth, module=4, lead_weeks=0) for growth in (0.05, 0.2))
    assert [step.devices for step in slow] == [step.devices for step in fast] == [8, 12, 16, 20, 24]
    assert all(late.month > soon.month for late, soon in zip(slow[1:], fast[1:], strict=True))


@pytest.mark.parametrize("module", [1, 3, 8, 100])
def test_at_no_time_are_fewer_owned_than_are_needed(module: int) -> None:
    steps = schedule(NEEDS, growth=0.1, module=module, lead_weeks=2)
    for before, after in itertools.pairwise(steps):
        assert after.devices - before.devices == module and after.month >= before.month
        assert 6 * after.factor == pytest.approx(before.devices)
    assert steps[-1].devices >= 24
