"""Adapter slots in the simulator's engine: planned adapters stay, and the least requested are evicted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.performance_model import Timing
from policy.engine.profiles import profile
from policy.placement.slots import HALF_LIFE_S, PREFETCH_PAUSE
from sim.twin.adapters import InTurnSlots, LeastRecentlyUsedSlots, TwinSlots
from sim.twin.engine import Engine, Job, Kind

PROFILE = profile("sim-small")
LOAD_S = 0.5


def engine(rules: type[TwinSlots] = TwinSlots, slots: int = 2) -> Engine:
    timing = Timing(limits=PROFILE.limits(1), model=PROFILE.model)
    return Engine(timing, slots=slots, adapter_load_s=LOAD_S, slot_rules=rules)


@pytest.mark.parametrize(("rules", "gone"), [(LeastRecentlyUsedSlots, "a"), (TwinSlots, "b")])
def test_the_least_recently_used_goes_for_others_and_the_least_asked_for_in_the_guard(
    rules: type[TwinSlots], gone: str
) -> None:
    one = engine(rules)
    for number, adapter in enumerate(("a", "a", "a", "b", "c")):
        one.submit(Job(number, 8, 1, adapter), 5.0 * number)
    one.advance(30.0)
    assert gone not in one.slots.loaded and len(one.slots.loaded) == 2


def test_what_is_held_is_loaded_ahead_and_stays_until_it_is_held_no_more() -> None:
    one = engine()
    one.slots.plan(["h"])
    assert one.next_at() == float("inf"), "nobody has looked"
    one.look_ahead(1.0)
    assert (one.slots.loading, one.slots.loaded, one.next_at()) == ("h", (), 1.0 + LOAD_S)
    one.advance(1.0 + LOAD_S)
    assert (one.slots.loading, one.slots.loaded, one.adapter_loads) == (None, ("h",), 1)
    for number, adapter in enumerate("abc"):
        one.submit(Job(number, 8, 1, adapter), 10.0 + 5.0 * number)
    one.advance(30.0)
    assert "h" in one.slots.loaded
    one.slots.plan([])
    one.submit(Job(3, 8, 1, "d"), 100.0)
    one.advance(110.0)
    assert "h" not in one.slots.loaded


def test_what_is_asked_for_more_does_not_go_for_what_is_held() -> None:
    one = engine(slots=1)
    one.submit(Job(0, 8, 1, "a"), 0.0)
    one.advance(5.0)
    one.slots.plan(["h"])
    one.look_ahead(5.0)
    assert (one.slots.loading, one.slots.loaded) == (None, ("a",))
    later = HALF_LIFE_S + 10.0  # asked for less than once in a minute by then
    one.look_ahead(later)
    assert (one.slots.loading, one.slots.loaded) == ("h", ())


def test_who_comes_while_its_adapter_is_loaded_ahead_waits_for_that_load() -> None:
    one = engine()
    one.slots.plan(["h"])
    one.look_ahead(0.0)
    one.submit(Job(0, 8, 1, "h"), 0.1)
    assert (one.slots.deferred, one.slots.awaited) == (1, ("h",))
    (first, done) = one.advance(5.0)
    assert (first.kind, done.kind, one.adapter_loads) == (Kind.FIRST, Kind.DONE, 1)
    assert first.at == pytest.approx(LOAD_S + PROFILE.model.step_time(8, 8, 1))


def test_those_that_run_get_more_time_before_a_load_that_nobody_waits_for() -> None:
    for held, pause in ((True, PREFETCH_PAUSE), (False, 1.0)):
        one = engine()
        one.submit(Job(0, 8, 2000, "a"), 0.0)
        one.catch_up(LOAD_S)
        if held:
            one.slots.plan(["h"])
            one.look_ahead(LOAD_S)
        else:
            one.submit(Job(1, 8, 1, "b"), LOAD_S)
        due = LOAD_S * (1.0 + pause)
        one.catch_up(due - 0.001)
        assert one.slots.loading is None and one.running == 1
        one.catch_up(due + 0.1)
        assert one.slots.loading == ("h" if held else "b")


def test_in_turn_an_adapter_is_loaded_again_if_it_went() -> None:
    for rules, loads in ((LeastRecentlyUsedSlots, 4), (InTurnSlots, 5)):
        one = engine(rules)
        for number, adapter in enumerate(("a", "b", "c", "d", "a")):
            one.submit(Job(number, 8, 1, adapter), 0.0)
        assert len([event for event in one.advance(60.0) if event.kind is Kind.DONE]) == 5
        assert one.adapter_loads == loads


@pytest.mark.slow
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.sampled_from([LeastRecentlyUsedSlots, InTurnSlots, TwinSlots]),
)
def test_whatever_comes_ends_and_slots_are_never_exceeded(
    seed: int, slots: int, rules: type[TwinSlots]
) -> None:
    rng = random.Random(seed)  # noqa: S311 - chance, not secrecy
    one = engine(rules, slots)
    one.slots.plan(["4", "9"])
    ended, at = [], 0.0
    for number in range(30):
        at += rng.expovariate(1.0)
        ended += [event.number for event in one.advance(at) if event.kind is Kind.DONE]
        one.submit(Job(number, 8, rng.randint(1, 20), str(rng.randrange(6))), at)
    while (at := one.next_at()) < float("inf"):
        ended += [event.number for event in one.advance(at) if event.kind is Kind.DONE]
        assert len(one.slots.loaded) + (one.slots.loading is not None) <= slots
    assert sorted(ended) == list(range(30)) and one.slots.deferred == 0
