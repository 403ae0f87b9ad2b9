"""A simulated replica: one thing at a time, loads shared or in turn, and nothing unloaded that is used."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.profiles import profile
from sim.arrivals import Arrival
from sim.placed import GuardRule
from sim.replica import Engine, Replica
from sim.rivals import LeastRecentlyUsed

PROFILE = profile("sim-small")
ENGINE = Engine(PROFILE.model, PROFILE.limits(1), slots=2, load_s=0.5)


def replica(*, shares: bool = True, slots: int = 2) -> Replica:
    return Replica(ENGINE._replace(slots=slots), LeastRecentlyUsed(shares=shares))


def ask(to: Replica, number: int, adapter: int, at: float = 0.0, tokens: int = 2) -> None:
    to.submit(number, Arrival(at, adapter, 8, tokens), at)


def run(one: Replica, at: float = 0.0) -> tuple[dict[int, float], float]:
    """When each request ended, and when there was nothing left to do."""
    ended = {}
    while (end := one.begin(at)) is not None:
        at = end
        ended.update(dict.fromkeys(one.finish(at).ended, at))
    return ended, at


def test_a_load_comes_first_and_then_the_steps() -> None:
    one = replica()
    ask(one, 1, 7)
    assert one.begin(0.0) == 0.5 and one.loading == 7
    assert one.begin(0.1) is None, "one thing at a time"
    assert one.finish(0.5).loaded and list(one.resident) == [7]
    ended, at = run(one, 0.5)
    step = PROFILE.model.step_time(8, 8, 1)
    assert one.loads == 1 and ended[1] == at
    assert at - 0.5 == pytest.approx(2 * step, rel=0.2)


def test_many_that_wait_for_one_adapter_share_its_load() -> None:
    one = replica()
    for number in range(20):
        ask(one, number, 7)
    ended, _ = run(one)
    assert one.loads == 1 and len(ended) == 20 and one.waited_for == set()


def test_in_turn_the_same_adapter_is_loaded_again_if_it_went() -> None:
    for shares, loads in ((True, 4), (False, 5)):
        one = replica(shares=shares)
        for number, adapter in enumerate((7, 8, 9, 10, 7)):
            ask(one, number, adapter, tokens=1)
        run(one)
        assert one.loads == loads


def test_what_is_used_is_not_unloaded() -> None:
    one = replica(slots=1)
    ask(one, 1, 7, tokens=200)
    one.begin(0.0)
    one.finish(0.5)
    ask(one, 2, 8, at=0.5)
    at = 0.5
    while 7 in one.resident and (end := one.begin(at)) is not None:
        users = one.resident.get(7)
        at = end
        one.finish(at)
    assert users is None and at > 1.0


def test_between_two_loads_those_that_run_get_as_much_time() -> None:
    one = replica(slots=3)
    ask(one, 1, 7, tokens=1000)
    one.begin(0.0)
    one.finish(0.5)
    for adapter in (8, 9):
        ask(one, adapter, adapter, at=0.5)
    at, loads = 0.5, []
    while len(loads) < 2 and (end := one.begin(at)) is not None:
        if one.loading is not None:
            loads.append((at, end))
        at = end
        one.finish(at)
    (first, until), (second, _) = loads
    assert first >= 1.0 and second >= until + 0.5
    assert second < until + 0.6, "and no more than that"


def test_the_least_recently_used_goes_for_others_and_the_least_asked_for_in_the_guard() -> None:
    for rule, gone in ((LeastRecentlyUsed(shares=True), 7), (GuardRule(), 8)):
        one = Replica(ENGINE, rule)
        for number, adapter in enumerate((7, 7, 7, 8, 9)):
            ask(one, number, adapter, tokens=1)
            run(one, float(number))
        assert gone not in one.resident and len(one.resident) == 2


def test_the_guard_keeps_what_is_held_and_loads_it_ahead() -> None:
    rule = GuardRule()
    one = Replica(ENGINE, rule)
    rule.hold = {5: 0}
    run(one)
    assert list(one.resident) == [5] and one.loads == 1
    for number, adapter in enumerate((7, 8, 9)):
        ask(one, number, adapter)
        run(one, 10.0 + number)
    assert 5 in one.resident
    rule.hold = {}
    ask(one, 9, 10, at=100.0)
    run(one, 100.0)
    assert 5 not in one.resident


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_whatever_comes_ends_and_slots_are_never_exceeded(seed: int, slots: int, shares: bool) -> None:
    rng = random.Random(seed)  # noqa: S311 - chance, not secrecy
    one = replica(slots=slots, shares=shares)
    for number in range(30):
        ask(one, number, rng.randrange(6), tokens=rng.randint(1, 20))
    at, ended = 0.0, []
    while (end := one.begin(at)) is not None:
        assert len(one.resident) + (one.loading is not None) <= slots
        at = end
        ended += one.finish(at).ended
    assert sorted(ended) == list(range(30)) and not any(one.resident.values())
