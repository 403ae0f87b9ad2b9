"""When a replica's card is not to be trusted or is slowed, and when the replica is replaced for it.

A replica leaves by being told to: its host drains it, ends, and whoever holds its layer starts another. Where
there is room its successor is started first. One of a model is replaced at a time, and after it there is a
pause that grows: who comes may get the same card.
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

# What was not heard of for so long may have paused.
UNHEARD_S = 10.0

# The pause between two replacements of a model.
PAUSE = Backoff(60.0, 3600.0)

# Hosts end a moment after they said so, and whoever holds the layer sees it later: until then it would let
# the youngest go, which is the successor.
PARTING_S = 3.0

# How long more than a drain one may take to leave before it is let be.
LATE_S = 60.0


class GpuHealth(NamedTuple):
    """What the cards of one replica told last, at ``heard``; ``slowed`` is since when without a pause."""

    heard: float
    slowed: float | None = None
    xid: int = 0
    card: str = ""


class Condition(NamedTuple):
    """Why a replica should leave; what is ``fatal`` may answer wrongly, the others only slowly."""

    why: str
    fatal: bool


def observe(before: GpuHealth | None, told: PowerReport | None, at: float) -> GpuHealth:
    """The health after a report; an error of a card stays until its replica has left."""
    if told is None:
        return before or GpuHealth(at)
    lasting = before is not None and at - before.heard <= UNHEARD_S
    earlier = before.slowed if before is not None and lasting else None
    slowed = None if not told.reasons & HARDWARE else at if earlier is None else earlier
    if is_of_card(told.xid):
        return GpuHealth(at, slowed, told.xid, told.card)
    return GpuHealth(at, slowed, *(before[2:] if before is not None else ()))


def condition(health: GpuHealth, at: float) -> Condition | None:
    """What ails a replica, if anything."""
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
    """One replica of the layer that serves, as it is: ``ready`` or not, and what ails it."""

    id: str
    ready: bool
    ailment: Condition | None = None


class ReplacementState(NamedTuple):
    """What a model has beside its replicas.

    ``aimed`` for are so many, ``healthy`` is the fewest that may be ready; ``room`` is whether one more fits,
    ``busy`` why none is replaced now. A start takes at most ``start_s``, a drain ``drain_s``.
    """

    aimed: int
    healthy: int
    room: bool
    busy: str = ""
    start_s: float = 600.0
    drain_s: float = 30.0


class ReplacementPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The replacement that goes on, if any, and what is left of the last.

    ``replica`` is replaced since ``begun``, by one ``more`` beside it where there is room; it was told to
    leave at ``told``, and was gone at ``gone``. ``row`` counts replacements in a row, after which there is
    a pause until ``pause``. ``note`` is what people should know.
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
        """Who has to leave."""
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
    """Have the successor of one that is only slow take the place of one whose card failed."""
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
    """Begin with the worst of those that ail, if any may leave."""
    unhealthy = sorted(
        (not s.ailment.fatal, s.id, s.ailment) for s in slots if s.ready and s.ailment is not None
    )
    # Whoever came has been well for as long again as was waited for it.
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
    """Let it leave once its successor is there; one with a fatal error only until others are enough."""
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
    """Wait until it is gone, and as long as it takes others to see that."""
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
    """How many others serve that can be trusted."""
    return sum(
        slot.ready and slot.id != replica and not (slot.ailment is not None and slot.ailment.fatal)
        for slot in slots
    )
