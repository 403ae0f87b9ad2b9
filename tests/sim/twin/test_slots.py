"""The twin's adapter slots: who waits for what, what is loaded next, and what goes for it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from sim.twin.adapter_slots import PATIENCE_S, LeastRecentlyUsed, Slots


def load(slots: Slots, at: float = 0.0) -> list[str]:
    """Load what comes next: who may go on."""
    adapter = slots.next()
    assert adapter is not None
    slots.load(adapter, at)
    return slots.enter(at)


def test_who_finds_its_adapter_goes_on_and_others_wait_for_the_load() -> None:
    slots = Slots(2, LeastRecentlyUsed())
    assert not slots.take("1", "a", 0.0) and not slots.take("2", "a", 0.0)
    assert (slots.deferred, slots.enter(0.0)) == (2, [])
    assert load(slots) == ["1", "2"]
    assert slots.take("3", "a", 0.0)
    assert (slots.deferred, slots.loads, slots.loaded, slots.next()) == (0, 1, ("a",), None)


def test_the_least_recently_used_goes() -> None:
    slots = Slots(2, LeastRecentlyUsed())
    for request, adapter in (("1", "a"), ("2", "b")):
        slots.take(request, adapter, 0.0)
        load(slots)
        slots.leave(adapter)
    assert slots.take("3", "a", 0.0)
    slots.leave("a")
    slots.take("4", "c", 0.0)
    assert load(slots) == ["4"]
    assert slots.loaded == ("a", "c")


def test_what_is_used_stays_and_who_finds_no_slot_waits() -> None:
    slots = Slots(1, LeastRecentlyUsed())
    slots.take("1", "a", 0.0)
    load(slots)
    assert not slots.take("2", "b", 0.0)
    assert slots.next() is None
    assert slots.take("3", "a", 0.0), "others pass it"
    slots.leave("a")
    assert slots.next() is None
    slots.leave("a")
    assert load(slots) == ["2"]


def test_whoever_waits_for_long_comes_before_newcomers() -> None:
    slots = Slots(1, LeastRecentlyUsed())
    slots.take("1", "a", 0.0)
    load(slots)
    slots.take("2", "b", 1.0)
    late = 1.0 + PATIENCE_S
    assert slots.take("3", "a", late - 0.01)
    assert not slots.take("4", "a", late)
    assert slots.enter(late) == []
    slots.leave("a")
    slots.leave("a")
    assert load(slots, late) == ["2"]
    slots.leave("b")
    assert load(slots, late) == ["4"]


def test_who_gives_up_is_not_waited_for() -> None:
    slots = Slots(1, LeastRecentlyUsed())
    slots.take("1", "a", 0.0)
    slots.take("2", "a", 0.0)
    slots.drop("1", "a")
    assert (slots.deferred, slots.next()) == (1, "a")
    slots.drop("2", "a")
    assert (slots.deferred, slots.next()) == (0, None)


@given(st.integers(0, 2**32), st.integers(1, 4))
def test_nobody_uses_what_is_not_loaded_and_everybody_has_their_turn(seed: int, capacity: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - no secret is drawn
    slots, at = Slots(capacity, LeastRecentlyUsed()), 0.0
    wants: dict[str, str] = {}
    using: list[str] = []
    for number in range(40):
        at += rng.random()
        wants[str(number)] = rng.choice("abcdef")
        if slots.take(str(number), wants[str(number)], at):
            using.append(str(number))
        while using and rng.random() < 0.5:
            slots.leave(wants[using.pop(rng.randrange(len(using)))])
        using += slots.enter(at)
        if slots.next() is not None:
            using += load(slots, at)
        assert len(slots.loaded) <= capacity
        assert {wants[request] for request in using} <= set(slots.loaded)
    for _ in range(2 * len(wants)):
        while using:
            slots.leave(wants[using.pop()])
        using = slots.enter(at)
        if slots.next() is not None:
            using += load(slots, at)
    assert slots.deferred == 0


def test_in_turn_nobody_passes_those_in_front() -> None:
    slots = Slots(1, LeastRecentlyUsed(shares=False))
    for request, adapter in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "c")):
        assert not slots.take(request, adapter, 0.0)
    for request, adapter in (("1", "a"), ("2", "b"), ("3", "a"), ("4", "c")):
        assert slots.next() == adapter
        assert load(slots) == [request]
        slots.leave(adapter)
    assert (slots.loads, slots.awaited) == (4, ())


def test_changes_count_what_goes_and_what_comes() -> None:
    slots = Slots(1, LeastRecentlyUsed())
    slots.take("1", "a", 0.0)
    slots.load("a", 0.0)
    assert (slots.loading, slots.loaded, slots.changes) == ("a", (), 0)
    slots.enter(1.0)
    assert (slots.loading, slots.loaded, slots.changes) == (None, ("a",), 1)
    slots.leave("a")
    slots.take("2", "b", 2.0)
    slots.load("b", 2.0)
    assert (slots.loaded, slots.changes) == ((), 2)
    slots.enter(3.0)
    assert (slots.loaded, slots.changes) == (("b",), 3)
