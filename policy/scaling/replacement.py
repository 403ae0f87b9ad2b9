"""Replacement of replicas whose GPUs fail or are throttled.

The replica's host drains it and ends, and the actuator starts another; where there is room, the successor
starts first. One replica of a model is replaced at a time, with a growing pause: the next may get the same
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from policy.stats.backoff import Backoff
from policy.wire.reports import PowerReport, is_of_card

# NVML's reasons for slow clocks that are the hardware's own: slowdown, heat, power brake.
HARDWARE = 0x08 | 0x40 | 0x80

SLOWED_S = 60.0

# After this time without a report throttling may have paused.
UNHEARD_S = 10.0

# The pause between two replacements of a model.
PAUSE = Backoff(60.0, 3600.0)

# The actuator sees the end of a host with a delay: before that it would remove the youngest, the successor.
PARTING_S = 3.0

# The time beyond the drain timeout after which the removal is given up.
LATE_S = 60.0


class GpuHealth(NamedTuple):
    """The last GPU report of a replica, at ``heard``; ``slowed`` is since when it has been throttled."""

    heard: float
    slowed: float | None = None
    xid: int = 0
    card: str = ""


class Condition(NamedTuple):
    """Why a replica should be replaced; a ``fatal`` condition may give wrong answers, others slow ones."""

    why: str
    fatal: bool


def observe(before: GpuHealth | None, told: PowerReport | None, at: float) -> GpuHealth:
    """The health after a report; an error of a GPU stays until the replica has ended."""
    if told is None:
        return before or GpuHealth(at)
    lasting = before is not None and at - before.heard <= UNHEARD_S
    earlier = before.slowed if before is not None and lasting else None
    slowed = None if not told.reasons & HARDWARE else at if earlier is None else earlier
    if is_of_card(told.xid):
        return GpuHealth(at, slowed, told.xid, told.card)
    return GpuHealth(at, slowed, *(before[2:] if before is not None else ()))


def condition(health: GpuHealth, at: float) -> Condition | None:
    """The condition of a replica, if it is unhealthy."""
    if health.xid:
        return Condition(f"XID {health.xid}" + (f" on {health.card}" if health.card else ""), fatal=True)
    if (
        health.slowed is not None
        and health.heard - health.slowed >= SLOWED_S
        and at - health.heard <= UNHEARD_S
    ):
        return Condition(f"throttled by hardware for {SLOWED_S:.0f} s", fatal=False)
    return None


class Slot(NamedTuple):
    """One replica of the serving layer, with its condition."""

    id: str
    ready: bool
    ailment: Condition | None = None


class ReplacementState(NamedTuple):
    """The state of a model: the desired count ``aimed``, and ``healthy``, the least ready replicas.

    ``room`` is whether one more fits, ``busy`` why none is replaced now; ``start_s`` and ``drain_s`` are
    timeouts.
    """

    aimed: int
    healthy: int
    room: bool
    busy: str = ""
    start_s: float = 600.0
    drain_s: float = 30.0


class ReplacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The current replacement, if any, and the back-off of the last.

    ``replica`` is being replaced since ``begun``, with one ``more`` beside it where there is room; its drain
    began at ``told``, and it had ended at ``gone``. ``row`` counts replacements in a row; the next waits
    until ``pause``. ``note`` is for operators.
    """

    replica: str = ""
    why: str = ""
    begun: float = 0.0
    more: bool = False
    told: float | None = None
    gone: float | None = None
    row: int = 0
    pause: float = 0.0
    note: str = ""

    @property
    def leaves(self) -> str:
        """The replica that has to drain."""
        return self.replica if self.told is not None and self.gone is None else ""


def step(
    before: ReplacementPlan, slots: Sequence[Slot], state: ReplacementState, at: float
) -> ReplacementPlan:
    """The next step of the replacement, or the first of another."""
    if before.replica and before.told is None:
        before = _worst(before, slots, at)
    if before.replica and before.told is None:
        before = _succeeded(before, slots, state, at)
    elif before.replica:
        before = _removed(before, slots, state, at)
    return before if before.replica else _chosen(before, slots, state, at)


def _worst(plan: ReplacementPlan, slots: Sequence[Slot], at: float) -> ReplacementPlan:
    """Replace a replica with a failed GPU before one that is only slow."""
    fatal = {s.id: s.ailment.why for s in slots if s.ready and s.ailment is not None and s.ailment.fatal}
    if not fatal or plan.replica in fatal:
        return plan
    replica = min(fatal)
    return msgspec.structs.replace(
        plan, replica=replica, why=fatal[replica], begun=at, note=_replaced(replica, fatal[replica])
    )


def _chosen(
    before: ReplacementPlan, slots: Sequence[Slot], state: ReplacementState, at: float
) -> ReplacementPlan:
    """Begin with the worst unhealthy replica, if one may leave."""
    unhealthy = sorted(
        (not s.ailment.fatal, s.id, s.ailment) for s in slots if s.ready and s.ailment is not None
    )
    # The back-off ends when the successor has been healthy for the same time again.
    forgotten = before.row and at >= before.pause + PAUSE.delay_s(before.row)
    if not unhealthy:
        return (
            ReplacementPlan()
            if forgotten or not before.row
            else ReplacementPlan(row=before.row, pause=before.pause)
        )
    row, pause = (0, 0.0) if forgotten else (before.row, before.pause)
    _, replica, found = unhealthy[0]
    rests = ReplacementPlan(row=row, pause=pause)
    said = f"{replica}: {found.why}"
    if row and at < pause:
        again = f"{row} replaced in a row: the next in {pause - at:.0f} s"
        return msgspec.structs.replace(rests, note=f"{said}; {again}")
    if state.busy and not found.fatal:
        return msgspec.structs.replace(rests, note=f"{said}; it is replaced when {state.busy}")
    more = state.room and not state.busy
    begun = msgspec.structs.replace(
        rests, replica=replica, why=found.why, begun=at, more=more, note=_replaced(replica, found.why)
    )
    if more:
        return _succeeded(begun, slots, state, at)
    if found.fatal or _others(replica, slots) >= max(1, state.healthy):
        return msgspec.structs.replace(begun, told=at)
    return msgspec.structs.replace(rests, note=f"{said}; kept: too few other replicas serve")


def _succeeded(
    plan: ReplacementPlan, slots: Sequence[Slot], state: ReplacementState, at: float
) -> ReplacementPlan:
    """Drain it once its successor is ready, or with a fatal error once enough others are."""
    slot = next((slot for slot in slots if slot.id == plan.replica), None)
    if slot is None or slot.ailment is None:
        # It recovered, or something else ended it.
        return ReplacementPlan(row=plan.row, pause=plan.pause)
    others, late = _others(plan.replica, slots), at - plan.begun >= state.start_s
    enough = max(1, state.healthy) if slot.ailment.fatal else state.aimed
    if others >= enough or not slot.ready or (late and slot.ailment.fatal):
        return msgspec.structs.replace(plan, told=at)
    # Where no successor can be had, a slow one is better than none.
    return _ended(plan, at) if late else plan


def _removed(
    plan: ReplacementPlan, slots: Sequence[Slot], state: ReplacementState, at: float
) -> ReplacementPlan:
    """Wait until it has ended, and the actuator has seen it."""
    assert plan.told is not None
    if plan.gone is not None:
        return _ended(plan, plan.gone) if at - plan.gone >= PARTING_S else plan
    if all(slot.id != plan.replica for slot in slots):
        return msgspec.structs.replace(plan, gone=at)
    return _ended(plan, at) if at - plan.told >= state.drain_s + LATE_S else plan


def _replaced(replica: str, why: str) -> str:
    return f"{replica}: {why}; it is being replaced"


def _ended(plan: ReplacementPlan, at: float) -> ReplacementPlan:
    row = plan.row + 1
    return ReplacementPlan(row=row, pause=at + PAUSE.delay_s(row))


def _others(replica: str, slots: Sequence[Slot]) -> int:
    """How many other replicas serve without a fatal condition."""
    return sum(
        slot.ready and slot.id != replica and not (slot.ailment is not None and slot.ailment.fatal)
        for slot in slots
    )
