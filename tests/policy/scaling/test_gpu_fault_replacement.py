"""When GPU conditions have a replica replaced: timelines and invariants."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.scaling import gpu_fault_replacement as replacement
from policy.scaling.gpu_fault_replacement import ReplacementState, ReplicaSlot, condition, observe, step
from policy.wire.controller_reports import GpuReport

XID, SLOW = (
    replacement.ReplicaFault("XID 79 on GPU 3", fatal=True),
    replacement.ReplicaFault("throttled by hardware for 60 s", fatal=False),
)


def health(*reasons: tuple[float, int]) -> replacement.ReplicaGpuHealth:
    """The health after reports of reasons for slow clocks, with their instants."""
    found: replacement.ReplicaGpuHealth | None = None
    for at, bits in reasons:
        found = observe(found, GpuReport(watts=300, reasons=bits), at)
    assert found is not None
    return found


def every_s(bits: int, until: float, since: float = 0.0) -> list[tuple[float, int]]:
    return [(since + i, bits) for i in range(int(until - since) + 1)]


@pytest.mark.parametrize("bits", [0x08, 0x40, 0x80, 0x48, 0x84])
def test_a_minute_of_hardware_throttling_is_a_condition(bits: int) -> None:
    assert condition(health(*every_s(bits, 59)), 59) is None
    assert condition(health(*every_s(bits, 60)), 60) == SLOW


@pytest.mark.parametrize("bits", [0, 0x01, 0x04, 0x20, 0x100])
def test_throttling_by_software_is_no_condition(bits: int) -> None:
    assert condition(health(*every_s(bits, 600)), 600) is None


def test_a_pause_restarts_the_minute() -> None:
    paused = [*every_s(0x8, 40), (41.0, 0x4), *every_s(0x8, 101, 42)]
    assert condition(health(*paused), 101) is None
    assert condition(health(*paused, (102.0, 0x8)), 102) == SLOW
    # Reasons may take turns, for they all slow it down.
    assert condition(health(*every_s(0x8, 30), *every_s(0x40, 60, 31)), 60) == SLOW


def test_missing_reports_are_no_throttling() -> None:
    assert condition(health((0.0, 0x8), (60.0, 0x8)), 60) is None
    assert condition(health(*every_s(0x8, 60)), 71) is None
    assert condition(health(*every_s(0x8, 30), *every_s(0x8, 99, 41)), 99) is None


def test_a_gpu_error_stays_and_a_program_error_is_ignored() -> None:
    found = observe(None, GpuReport(watts=0, xid=79, card="GPU 3"), 0.0)
    assert condition(found, 0.0) == XID
    assert condition(observe(found, GpuReport(watts=300), 2.0), 99.0) == XID
    for xid in (13, 31, 43, 45):
        assert condition(observe(None, GpuReport(watts=300, xid=xid, card="GPU 0"), 0.0), 0.0) is None


@dataclass
class Fleet:
    """Replicas that start in ``lead_s`` and drain in ``drain_s``; one more is there while asked for."""

    count: int = 2
    room: bool = True
    healthy: int = 1
    lead_s: float = 20.0
    drain_s: float = 5.0
    starts: bool = True
    busy: str = ""
    at: float = 0.0
    plan: replacement.ReplacementPlan = field(default_factory=replacement.ReplacementPlan)
    ready_at: dict[str, float] = field(default_factory=dict)
    drains: dict[str, float] = field(default_factory=dict)
    conditions: dict[str, replacement.ReplicaFault] = field(default_factory=dict)
    left: list[tuple[float, str]] = field(default_factory=list)
    fewest: int = 99
    most: int = 0

    def __post_init__(self) -> None:
        self.ready_at = {f"r{i}": 0.0 for i in range(self.count)}

    def ready(self) -> list[str]:
        return [name for name, at in self.ready_at.items() if at <= self.at and name not in self.drains]

    def run(self, seconds: float, *, step_s: float = 1.0) -> Fleet:
        until = self.at + seconds
        while self.at < until:
            self.tick()
            self.at += step_s
        return self

    def tick(self) -> None:
        for gone in [name for name, at in self.drains.items() if at <= self.at]:
            del self.drains[gone], self.ready_at[gone]
        serving = self.ready()
        slots = [ReplicaSlot(name, name in serving, self.conditions.get(name)) for name in self.ready_at]
        state = ReplacementState(
            self.at,
            slots,
            self.count,
            self.healthy,
            self.room,
            self.busy,
            start_s=100.0,
            drain_s=self.drain_s,
        )
        self.plan = step(self.plan, state)
        leaves = self.plan.leaves
        if leaves and leaves not in self.drains:
            self.drains[leaves] = self.at + self.drain_s
            self.left.append((self.at, leaves))
        wanted = self.count + self.plan.more
        staying = [name for name in self.ready_at if name not in self.drains]
        # A draining replica holds its resources until it has ended.
        while self.starts and len(self.ready_at) < wanted:
            self.ready_at[f"r{len(self.left)}-{self.at:.0f}-{len(self.ready_at)}"] = self.at + self.lead_s
        for name in staying[wanted:]:
            del self.ready_at[name]
        self.fewest, self.most = min(self.fewest, len(self.ready())), max(self.most, len(self.ready_at))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_with_room_a_slow_replica_drains_when_its_successor_is_ready(count: int) -> None:
    fleet = Fleet(count=count)
    fleet.conditions["r0"] = SLOW
    fleet.run(10)
    assert (fleet.left, fleet.plan.more) == ([], True)
    assert "throttled by hardware for 60 s; it is being replaced" in fleet.plan.note
    fleet.run(60)
    assert fleet.left == [(20.0, "r0")]
    assert fleet.fewest == count
    assert len(fleet.ready()) == count and "r0" not in fleet.ready()
    assert (fleet.plan.replica, fleet.plan.more, fleet.plan.note) == ("", False, "")


def test_without_room_it_drains_only_while_enough_others_serve() -> None:
    for healthy, leaves in ((1, True), (2, True), (3, False)):
        fleet = Fleet(count=3, room=False, healthy=healthy)
        fleet.conditions["r0"] = SLOW
        fleet.run(100)
        assert bool(fleet.left) == leaves
        assert fleet.fewest == (2 if leaves else 3)
    assert "kept: too few other replicas serve" in fleet.plan.note
    alone = Fleet(count=1, room=False, healthy=0)
    alone.conditions["r0"] = SLOW
    assert alone.run(1000).left == []


def test_a_gpu_error_drains_at_once_while_others_serve() -> None:
    fleet = Fleet(count=2)
    fleet.conditions["r1"] = XID
    fleet.run(1)
    assert fleet.left == [(0.0, "r1")]
    assert len(fleet.ready_at) == 3
    fleet.run(60)
    assert len(fleet.ready()) == 2 and fleet.plan.replica == ""


def test_the_last_replica_with_a_gpu_error_waits_for_its_successor_if_there_is_room() -> None:
    roomy, scarce = Fleet(count=1), Fleet(count=1, room=False)
    for fleet in (roomy, scarce):
        fleet.conditions["r0"] = XID
        fleet.run(60)
    assert (roomy.left, roomy.fewest) == ([(20.0, "r0")], 1)
    assert (scarce.left, scarce.fewest) == ([(0.0, "r0")], 0)
    # A successor that never comes is not waited for longer than a start takes.
    broken = Fleet(count=1, starts=False)
    broken.conditions["r0"] = XID
    assert broken.run(150).left == [(100.0, "r0")]


def test_a_slow_replica_stays_without_a_successor() -> None:
    fleet = Fleet(count=2, starts=False)
    fleet.conditions["r0"] = SLOW
    fleet.run(130)
    assert fleet.left == []
    assert not fleet.plan.more and "1 replaced in a row: the next in" in fleet.plan.note


def test_a_replica_that_recovers_stays() -> None:
    fleet = Fleet()
    fleet.conditions["r0"] = SLOW
    fleet.run(10)
    del fleet.conditions["r0"]
    fleet.run(30)
    assert (fleet.left, fleet.plan, sorted(fleet.ready())) == (
        [],
        replacement.ReplacementPlan(),
        ["r0", "r1"],
    )


def test_a_gpu_error_is_replaced_before_a_slow_replica() -> None:
    fleet = Fleet(count=3)
    fleet.conditions["r0"] = SLOW
    fleet.run(5)
    fleet.conditions["r2"] = XID
    fleet.run(30)
    assert [name for _, name in fleet.left] == ["r2"]


def test_a_mode_switch_postpones_all_but_gpu_errors() -> None:
    for found, left in ((SLOW, []), (XID, ["r0"])):
        fleet = Fleet(busy="the switch is over")
        fleet.conditions["r0"] = found
        fleet.run(30)
        assert [name for _, name in fleet.left] == left
        if not left:
            assert "it is replaced when the switch is over" in fleet.plan.note


@pytest.mark.slow
def test_repeated_replacements_back_off() -> None:
    fleet = Fleet(count=1)
    for _ in range(40_000):
        fleet.conditions = dict.fromkeys(fleet.ready(), SLOW)
        fleet.run(1)
    times = [at for at, _ in fleet.left]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps[:5] == sorted(gaps[:5]) and gaps[0] >= 60
    assert gaps[-1] == pytest.approx(replacement.PAUSE.max_s, abs=60)
    assert len(times) < 20
    assert "replaced in a row: the next in" in fleet.plan.note
    assert fleet.fewest == 1


def test_a_healthy_time_resets_the_back_off() -> None:
    fleet = Fleet()
    fleet.conditions["r0"] = SLOW
    fleet.run(60)
    fleet.conditions = {}
    fleet.run(200)
    assert fleet.plan == replacement.ReplacementPlan()


conditions = st.sampled_from([None, None, SLOW, XID])


@given(
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 9), conditions), max_size=40),
)
def test_one_replacement_at_a_time_and_never_of_the_last_slow_replica(
    count: int,
    room: bool,
    healthy: int,
    starts: bool,
    turns: list[tuple[int, replacement.ReplicaFault | None]],
) -> None:
    fleet = Fleet(count=count, room=room, healthy=min(healthy, count), starts=starts, drain_s=7.0)
    for index, found in turns:
        names = sorted(fleet.ready_at)
        if names:
            name = names[index % len(names)]
            fleet.conditions.pop(name, None)
            if found is not None:
                fleet.conditions[name] = found
        for _ in range(4):
            before, served = list(fleet.left), fleet.ready()
            fleet.run(1)
            assert len(fleet.drains) <= 1
            assert len(fleet.ready_at) <= count + 1
            for _, gone in fleet.left[len(before) :]:
                if fleet.conditions.get(gone) is SLOW and gone in served:
                    rest = [n for n in served if n != gone and fleet.conditions.get(n) is not XID]
                    assert len(rest) >= max(1, fleet.healthy)
    if not room:
        assert fleet.most <= count


def test_the_extra_replica_is_kept_until_the_actuator_has_seen_the_end() -> None:
    fleet = Fleet(count=1, drain_s=2.0)
    fleet.conditions["r0"] = SLOW
    fleet.run(22)
    assert fleet.left and "r0" in fleet.ready_at
    fleet.run(1)
    gone = fleet.at - 1
    while fleet.plan.more:
        fleet.run(1)
    assert fleet.at - 1 - gone == replacement.PARTING_S
