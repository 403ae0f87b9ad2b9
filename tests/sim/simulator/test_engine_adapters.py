"""Adapter slots in the simulator's engine: planned adapters stay, and the least requested are evicted."""

from __future__ import annotations

import pytest

from policy.adapter_placement.slots import PREFETCH_PAUSE
from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import Timing
from sim.simulator.adapters import SimulatedSlots
from sim.simulator.engine import EngineJob, TokenEventKind, VirtualTimeEngine

PROFILE = profile("sim-small")
LOAD_S = 0.5


def engine(rules: type[SimulatedSlots] = SimulatedSlots, slots: int = 2) -> VirtualTimeEngine:
    timing = Timing(limits=PROFILE.limits(1), model=PROFILE.model)
    return VirtualTimeEngine(timing, slots=slots, adapter_load_s=LOAD_S, slot_rules=rules)


def test_a_planned_adapter_is_prefetched_and_stays_while_it_is_planned() -> None:
    one = engine()
    one.slots.plan(["h"])
    assert one.next_at() == float("inf"), "nobody has looked"
    one.look_ahead(1.0)
    assert (one.slots.loading, one.slots.loaded, one.next_at()) == ("h", (), 1.0 + LOAD_S)
    one.advance(1.0 + LOAD_S)
    assert (one.slots.loading, one.slots.loaded, one.adapter_loads) == (None, ("h",), 1)
    for number, adapter in enumerate("abc"):
        one.submit(EngineJob(number, 8, 1, adapter), 10.0 + 5.0 * number)
    one.advance(30.0)
    assert "h" in one.slots.loaded
    one.slots.plan([])
    one.submit(EngineJob(3, 8, 1, "d"), 100.0)
    one.advance(110.0)
    assert "h" not in one.slots.loaded


def test_a_request_waits_for_the_prefetch_of_its_adapter() -> None:
    one = engine()
    one.slots.plan(["h"])
    one.look_ahead(0.0)
    one.submit(EngineJob(0, 8, 1, "h"), 0.1)
    assert (one.slots.deferred, one.slots.awaited) == (1, ("h",))
    (first, done) = one.advance(5.0)
    assert (first.kind, done.kind, one.adapter_loads) == (TokenEventKind.FIRST, TokenEventKind.DONE, 1)
    assert first.at == pytest.approx(LOAD_S + PROFILE.model.step_time(8, 8, 1))


def test_running_requests_get_more_time_before_a_prefetch() -> None:
    for held, pause in ((True, PREFETCH_PAUSE), (False, 1.0)):
        one = engine()
        one.submit(EngineJob(0, 8, 2000, "a"), 0.0)
        one.catch_up(LOAD_S)
        if held:
            one.slots.plan(["h"])
            one.look_ahead(LOAD_S)
        else:
            one.submit(EngineJob(1, 8, 1, "b"), LOAD_S)
        due = LOAD_S * (1.0 + pause)
        one.catch_up(due - 0.001)
        assert one.slots.loading is None and one.running == 1
        one.catch_up(due + 0.1)
        assert one.slots.loading == ("h" if held else "b")
