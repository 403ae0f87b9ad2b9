"""When cards have their replica replaced: timelines of what they tell, and laws of the replacement."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.scaling.replacement import (
    PARTING_S,
    PAUSE,
    Condition,
    GpuHealth,
    ReplacementPlan,
    ReplacementState,
    Slot,
    condition,
    observe,
    step,
)
from policy.wire.reports import PowerReport

XID, SLOW = Condition("XID 79 on GPU 3", fatal=True), Condition("throttled by hardware for 60 s", fatal=False)


def pulse(*reasons: tuple[float, int]) -> GpuHealth:
    """That of one whose cards told those reasons for slow clocks at those times."""
    found: GpuHealth | None = None
    for at, bits in reasons:
        found = observe(found, PowerReport(watts=300, reasons=bits), at)
    assert found is not None
    return found


def every_s(bits: int, until: float, since: float = 0.0) -> list[tuple[float, int]]:
    return [(since + i, bits) for i in range(int(until - since) + 1)]


@pytest.mark.parametrize("bits", [0x08, 0x40, 0x80, 0x48, 0x84])
def test_a_minute_of_hardware_slowdown_ails(bits: int) -> None:
    assert condition(pulse(*every_s(bits, 59)), 59) is None
    assert condition(pulse(*every_s(bits, 60)), 60) == SLOW


@pytest.mark.parametrize("bits", [0, 0x01, 0x04, 0x20, 0x100])
def test_what_software_holds_back_does_not(bits: int) -> None:
    assert condition(pulse(*every_s(bits, 600)), 600) is None


def test_a_pause_begins_the_minute_anew() -> None:
    paused = [*every_s(0x8, 40), (41.0, 0x4), *every_s(0x8, 101, 42)]
    assert condition(pulse(*paused), 101) is None
    assert condition(pulse(*paused, (102.0, 0x8)), 102) == SLOW
    # Reasons may take turns, for they all slow it down.
    assert condition(pulse(*every_s(0x8, 30), *every_s(0x40, 60, 31)), 60) == SLOW


def test_silence_is_no_slowdown() -> None:
    assert condition(pulse((0.0, 0x8), (60.0, 0x8)), 60) is None
    assert condition(pulse(*every_s(0x8, 60)), 71) is None
    assert condition(pulse(*every_s(0x8, 30), *every_s(0x8, 99, 41)), 99) is None


def test_an_error_of_a_card_stays_and_one_of_a_program_is_none() -> None:
    found = observe(None, PowerReport(watts=0, xid=79, card="GPU 3"), 0.0)
    assert condition(found, 0.0) == XID
    assert condition(observe(observe(found, None, 1.0), PowerReport(watts=300), 2.0), 99.0) == XID
    for xid in (13, 31, 43, 45):
        assert condition(observe(None, PowerReport(watts=300, xid=xid, card="GPU 0"), 0.0), 0.0) is None


@dataclass
class Floor:
    """Replicas that start in ``lead_s`` and drain in ``drain_s``; one more is there while asked for."""

    count: int = 2
    room: bool = True
    healthy: int = 1
    lead_s: float = 20.0
    drain_s: float = 5.0
    starts: bool = True
    busy: str = ""
    at: float = 0.0
    care: ReplacementPlan = field(default_factory=ReplacementPlan)
    ready_at: dict[str, float] = field(default_factory=dict)
    drains: dict[str, float] = field(default_factory=dict)
    ills: dict[str, Condition] = field(default_factory=dict)
    left: list[tuple[float, str]] = field(default_factory=list)
    fewest: int = 99
    most: int = 0

    def __post_init__(self) -> None:
        self.ready_at = {f"r{i}": 0.0 for i in range(self.count)}

    def ready(self) -> list[str]:
        return [name for name, at in self.ready_at.items() if at <= self.at and name not in self.drains]

    def run(self, seconds: float, *, step_s: float = 1.0) -> Floor:
        until = self.at + seconds
        while self.at < until:
            self.tick()
            self.at += step_s
        return self

    def tick(self) -> None:
        for gone in [name for name, at in self.drains.items() if at <= self.at]:
            del self.drains[gone], self.ready_at[gone]
        serving = self.ready()
        seats = [Slot(name, name in serving, self.ills.get(name)) for name in self.ready_at]
        ward = ReplacementState(
            self.count, self.healthy, self.room, self.busy, start_s=100.0, drain_s=self.drain_s
        )
        self.care = step(self.care, seats, ward, self.at)
        leaves = self.care.leaves
        if leaves and leaves not in self.drains:
            self.drains[leaves] = self.at + self.drain_s
            self.left.append((self.at, leaves))
        wanted = self.count + self.care.more
        staying = [name for name in self.ready_at if name not in self.drains]
        # Whoever leaves holds its place until it is gone.
        while self.starts and len(self.ready_at) < wanted:
            self.ready_at[f"r{len(self.left)}-{self.at:.0f}-{len(self.ready_at)}"] = self.at + self.lead_s
        for name in staying[wanted:]:
            del self.ready_at[name]
        self.fewest, self.most = min(self.fewest, len(self.ready())), max(self.most, len(self.ready_at))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_with_room_a_slow_one_leaves_when_its_successor_serves(count: int) -> None:
    floor = Floor(count=count)
    floor.ills["r0"] = SLOW
    floor.run(10)
    assert (floor.left, floor.care.more) == ([], True)
    assert "throttled by hardware for 60 s; it is being replaced" in floor.care.note
    floor.run(60)
    assert floor.left == [(20.0, "r0")]
    assert floor.fewest == count
    assert len(floor.ready()) == count and "r0" not in floor.ready()
    assert (floor.care.replica, floor.care.more, floor.care.note) == ("", False, "")


def test_without_room_it_leaves_only_while_enough_others_serve() -> None:
    for healthy, leaves in ((1, True), (2, True), (3, False)):
        floor = Floor(count=3, room=False, healthy=healthy)
        floor.ills["r0"] = SLOW
        floor.run(100)
        assert bool(floor.left) == leaves
        assert floor.fewest == (2 if leaves else 3)
    assert "kept: too few other replicas serve" in floor.care.note
    alone = Floor(count=1, room=False, healthy=0)
    alone.ills["r0"] = SLOW
    assert alone.run(1000).left == []


def test_an_error_has_it_leave_at_once_while_others_serve_and_its_successor_comes_meanwhile() -> None:
    floor = Floor(count=2)
    floor.ills["r1"] = XID
    floor.run(1)
    assert floor.left == [(0.0, "r1")]
    assert len(floor.ready_at) == 3
    floor.run(60)
    assert len(floor.ready()) == 2 and floor.care.replica == ""


def test_the_last_one_with_an_error_waits_for_its_successor_and_without_room_for_nobody() -> None:
    roomy, scarce = Floor(count=1), Floor(count=1, room=False)
    for floor in (roomy, scarce):
        floor.ills["r0"] = XID
        floor.run(60)
    assert (roomy.left, roomy.fewest) == ([(20.0, "r0")], 1)
    assert (scarce.left, scarce.fewest) == ([(0.0, "r0")], 0)
    # A successor that never comes is not waited for longer than a start takes.
    broken = Floor(count=1, starts=False)
    broken.ills["r0"] = XID
    assert broken.run(150).left == [(100.0, "r0")]


def test_a_slow_one_whose_successor_does_not_come_stays() -> None:
    floor = Floor(count=2, starts=False)
    floor.ills["r0"] = SLOW
    floor.run(130)
    assert floor.left == []
    assert not floor.care.more and "1 replaced in a row: the next in" in floor.care.note


def test_one_that_recovers_stays() -> None:
    floor = Floor()
    floor.ills["r0"] = SLOW
    floor.run(10)
    del floor.ills["r0"]
    floor.run(30)
    assert (floor.left, floor.care, sorted(floor.ready())) == ([], ReplacementPlan(), ["r0", "r1"])


def test_an_error_goes_before_one_that_is_slow() -> None:
    floor = Floor(count=3)
    floor.ills["r0"] = SLOW
    floor.run(5)
    floor.ills["r2"] = XID
    floor.run(30)
    assert [name for _, name in floor.left] == ["r2"]


def test_a_switch_ends_first_but_for_an_error() -> None:
    for found, left in ((SLOW, []), (XID, ["r0"])):
        floor = Floor(busy="the switch is over")
        floor.ills["r0"] = found
        floor.run(30)
        assert [name for _, name in floor.left] == left
        if not left:
            assert "it is replaced when the switch is over" in floor.care.note


def test_the_same_bad_card_again_and_again_is_tried_more_and_more_seldom() -> None:
    floor = Floor(count=1)
    for _ in range(40_000):
        floor.ills = dict.fromkeys(floor.ready(), SLOW)
        floor.run(1)
    times = [at for at, _ in floor.left]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:5] == sorted(gaps[:5]) and gaps[0] >= 60
    assert gaps[-1] == pytest.approx(PAUSE.max_s, abs=60)
    assert len(times) < 20
    assert "replaced in a row: the next in" in floor.care.note
    assert floor.fewest == 1


def test_who_was_well_for_long_enough_begins_a_new_row() -> None:
    floor = Floor()
    floor.ills["r0"] = SLOW
    floor.run(60)
    floor.ills = {}
    floor.run(200)
    assert floor.care == ReplacementPlan()


ails = st.sampled_from([None, None, SLOW, XID])


@given(
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 9), ails), max_size=40),
)
def test_never_two_at_a_time_and_never_the_last_for_being_slow(
    count: int, room: bool, healthy: int, starts: bool, turns: list[tuple[int, Condition | None]]
) -> None:
    floor = Floor(count=count, room=room, healthy=min(healthy, count), starts=starts, drain_s=7.0)
    for index, found in turns:
        names = sorted(floor.ready_at)
        if names:
            name = names[index % len(names)]
            floor.ills.pop(name, None)
            if found is not None:
                floor.ills[name] = found
        for _ in range(4):
            before, served = list(floor.left), floor.ready()
            floor.run(1)
            assert len(floor.drains) <= 1
            assert len(floor.ready_at) <= count + 1
            for _, gone in floor.left[len(before) :]:
                if floor.ills.get(gone) is SLOW and gone in served:
                    rest = [n for n in served if n != gone and floor.ills.get(n) is not XID]
                    assert len(rest) >= max(1, floor.healthy)
    if not room:
        assert floor.most <= count


def test_the_place_beside_is_given_up_only_after_others_have_seen_it_leave() -> None:
    floor = Floor(count=1, drain_s=2.0)
    floor.ills["r0"] = SLOW
    floor.run(22)
    assert floor.left and "r0" in floor.ready_at
    floor.run(1)
    gone = floor.at - 1
    while floor.care.more:
        floor.run(1)
    assert floor.at - 1 - gone == PARTING_S
