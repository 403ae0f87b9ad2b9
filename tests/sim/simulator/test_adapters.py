"""Adapter slots in the simulator: they evict as a replica does; the baselines have their own rules."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.adapter_placement.slots import PATIENCE_S
from policy.wire.heartbeat import AdapterRef
from sim.simulator.adapters import LeastRecentlyUsedSlots, SequentialLoadSlots, SimulatedSlots
from tests.serve.engine.fakes import User, quiet, replica, wanted


def load(slots: SimulatedSlots, at: float = 0.0) -> list[str]:
    step = slots.next(at)
    assert step is not None
    slots.begin_load(*step)
    return slots.admit_waiting(at)


def next_adapter(slots: SimulatedSlots, at: float = 0.0) -> str | None:
    step = slots.next(at)
    return None if step is None else step[0].adapter


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
async def test_the_simulated_slots_load_and_evict_as_the_adapter_loader_does(seed: int, slots: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - no secret is drawn
    simulated, log, using = SimulatedSlots(slots), [], dict[int, str]()

    def settle(at: float) -> None:
        while True:
            for request in simulated.admit_waiting(at):
                using[int(request)] = users[int(request)].letter
            step = simulated.next(at)
            if step is None:
                return
            log.extend([f"-{step[1].adapter}"] if step[1] is not None else [])
            log.append(f"+{step[0].adapter}")
            simulated.begin_load(*step)

    async with replica(slots) as real:
        users: list[User] = []
        for _ in range(120):
            real.clock.now += rng.choice([0.01, 0.5, 0.9 * PATIENCE_S, 20.0])
            at, choice = real.clock.now, rng.random()
            if choice < 0.55:
                users.append(real.use(rng.choice("aaabbcdef")))
                number, letter = len(users) - 1, users[-1].letter
                if simulated.submit(str(number), letter, at):
                    using[number] = letter
            elif choice < 0.9 and using:
                number = rng.choice(list(using))
                await users[number].stop()
                simulated.finish(using.pop(number))
            else:
                planned = rng.sample("abcdef", rng.randint(0, 3))[:slots]
                real.adapters.hold(
                    [AdapterRef(name=ref.name, digest=ref.digest) for ref in wanted("".join(planned))]
                )
                simulated.plan(planned)
            await quiet()
            settle(at)
            assert real.engine.log == log
            assert {number for number, user in enumerate(users) if user.in_use} == set(using)
        for user in users:
            user.task.cancel()


def test_requests_for_a_loaded_adapter_overtake_those_waiting_for_a_slot() -> None:
    slots = LeastRecentlyUsedSlots(1)
    assert not slots.submit("1", "a", 0.0) and not slots.submit("2", "a", 0.0)
    assert (slots.deferred, slots.admit_waiting(0.0)) == (2, [])
    assert load(slots) == ["1", "2"]
    assert not slots.submit("3", "b", 0.0)
    assert slots.submit("4", "a", 0.0)
    assert (slots.deferred, slots.loads, slots.loaded, slots.next(0.0)) == (1, 1, ("a",), None)
    for _ in range(3):
        slots.finish("a")
    assert load(slots) == ["3"]
    slots.submit("5", "c", 0.0)
    slots.submit("6", "c", 0.0)
    for request, left in (("5", 1), ("6", 0)):
        slots.abort(request, "c")
        assert slots.deferred == left


def test_the_least_recently_used_is_evicted() -> None:
    slots = LeastRecentlyUsedSlots(2)
    for request, adapter in (("1", "a"), ("2", "b")):
        slots.submit(request, adapter, 0.0)
        load(slots)
        slots.finish(adapter)
    assert slots.submit("3", "a", 0.0)
    slots.finish("a")
    slots.submit("4", "c", 0.0)
    assert load(slots) == ["4"]
    assert slots.loaded == ("a", "c")


def test_in_turn_slots_serve_requests_in_order_of_arrival() -> None:
    slots = SequentialLoadSlots(1)
    requests = (("1", "a"), ("2", "b"), ("3", "a"), ("4", "c"))
    for request, adapter in requests:
        assert not slots.submit(request, adapter, 0.0)
    for request, adapter in requests:
        assert next_adapter(slots) == adapter
        assert load(slots) == [request]
        slots.finish(adapter)
    assert (slots.loads, slots.awaited) == (4, ())


def test_changes_count_evictions_and_ended_loads() -> None:
    slots = SimulatedSlots(1)
    for request, adapter, changes in (("1", "a", 0), ("2", "b", 2)):
        slots.submit(request, adapter, 0.0)
        step = slots.next(0.0)
        assert step is not None
        slots.begin_load(*step)
        assert (slots.loading, slots.loaded, slots.changes) == (adapter, (), changes)
        slots.admit_waiting(1.0)
        assert (slots.loading, slots.loaded, slots.changes) == (None, (adapter,), changes + 1)
        slots.finish(adapter)


@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.sampled_from([SimulatedSlots, LeastRecentlyUsedSlots, SequentialLoadSlots]),
)
def test_requests_use_only_loaded_adapters(seed: int, capacity: int, rules: type[SimulatedSlots]) -> None:
    rng = random.Random(seed)  # noqa: S311 - no secret is drawn
    slots, at = rules(capacity), 0.0
    adapters: dict[str, str] = {}
    using: list[str] = []
    for number in range(40):
        at += rng.random()
        adapters[str(number)] = rng.choice("abcdef")
        if slots.submit(str(number), adapters[str(number)], at):
            using.append(str(number))
        while using and rng.random() < 0.5:
            slots.finish(adapters[using.pop(rng.randrange(len(using)))])
        using += slots.admit_waiting(at)
        if slots.next(at) is not None:
            using += load(slots, at)
        assert len(slots.loaded) <= capacity
        assert {adapters[request] for request in using} <= set(slots.loaded)
    for _ in range(2 * len(adapters)):
        while using:
            slots.finish(adapters[using.pop()])
        using = slots.admit_waiting(at)
        if slots.next(at) is not None:
            using += load(slots, at)
    assert slots.deferred == 0
