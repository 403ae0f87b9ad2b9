"""When a replica's card is not to be trusted or is slowed, and when the replica is replaced for it.

A replica leaves by being told to: its host drains it, ends, and whoever holds its layer starts another. Where
there is room its successor is started first. One of a model is replaced at a time, and after it there is a
pause that grows: who comes may get the same card.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from policy.gpu_errors import is_of_card
from policy.stats.backoff import Backoff
from policy.wire.reports import PowerReport

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
    """The pulse after a report; an error of a card stays until its replica has left."""
    if told is None:
        return before or GpuHealth(at)
    lasting = before is not None and at - before.heard <= UNHEARD_S
    earlier = before.slowed if before is not None and lasting else None
    slowed = None if not told.reasons & HARDWARE else at if earlier is None else earlier
    if is_of_card(told.xid):
        return GpuHealth(at, slowed, told.xid, told.card)
    return GpuHealth(at, slowed, *(before[2:] if before is not None else ()))


def condition(pulse: GpuHealth, at: float) -> Condition | None:
    """What ails a replica, if anything."""
    if pulse.xid:
        return Condition(f"XID {pulse.xid}" + (f" on {pulse.card}" if pulse.card else ""), fatal=True)
    if pulse.slowed is not None and pulse.heard - pulse.slowed >= SLOWED_S and at - pulse.heard <= UNHEARD_S:
        return Condition(f"slowed by hardware for {SLOWED_S:.0f} s", fatal=False)
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
    before: ReplacementPlan, seats: Sequence[Slot], ward: ReplacementState, at: float
) -> ReplacementPlan:
    """The next step of the replacement, or the first of another."""
    if before.replica and before.told is None:
        before = _worst(before, seats, at)
    if before.replica and before.told is None:
        before = _succeeded(before, seats, ward, at)
    elif before.replica:
        before = _parted(before, seats, ward, at)
    return before if before.replica else _chosen(before, seats, ward, at)


def _worst(care: ReplacementPlan, seats: Sequence[Slot], at: float) -> ReplacementPlan:
    """Have the successor of one that is only slow take the place of one whose card failed."""
    fatal = {s.id: s.ailment.why for s in seats if s.ready and s.ailment is not None and s.ailment.fatal}
    if not fatal or care.replica in fatal:
        return care
    replica = min(fatal)
    return msgspec.structs.replace(
        care, replica=replica, why=fatal[replica], begun=at, note=_replaced(replica, fatal[replica])
    )


def _chosen(
    before: ReplacementPlan, seats: Sequence[Slot], ward: ReplacementState, at: float
) -> ReplacementPlan:
    """Begin with the worst of those that ail, if any may leave."""
    ill = sorted((not s.ailment.fatal, s.id, s.ailment) for s in seats if s.ready and s.ailment is not None)
    # Whoever came has been well for as long again as was waited for it.
    forgotten = before.row and at >= before.pause + PAUSE.delay_s(before.row)
    if not ill:
        return (
            ReplacementPlan()
            if forgotten or not before.row
            else ReplacementPlan(row=before.row, pause=before.pause)
        )
    row, pause = (0, 0.0) if forgotten else (before.row, before.pause)
    _, replica, found = ill[0]
    rests = ReplacementPlan(row=row, pause=pause)
    said = f"{replica}: {found.why}"
    if row and at < pause:
        again = f"{row} in a row were replaced: the next in {pause - at:.0f} s"
        return msgspec.structs.replace(rests, note=f"{said}; {again}")
    if ward.busy and not found.fatal:
        return msgspec.structs.replace(rests, note=f"{said}; it is replaced when {ward.busy}")
    more = ward.room and not ward.busy
    begun = msgspec.structs.replace(
        rests, replica=replica, why=found.why, begun=at, more=more, note=_replaced(replica, found.why)
    )
    if more:
        return _succeeded(begun, seats, ward, at)
    if found.fatal or _others(replica, seats) >= max(1, ward.healthy):
        return msgspec.structs.replace(begun, told=at)
    return msgspec.structs.replace(rests, note=f"{said}; it stays: too few others serve")


def _succeeded(
    care: ReplacementPlan, seats: Sequence[Slot], ward: ReplacementState, at: float
) -> ReplacementPlan:
    """Let it leave once its successor is there; one with a fatal error only until others are enough."""
    seat = next((seat for seat in seats if seat.id == care.replica), None)
    if seat is None or seat.ailment is None:
        # It recovered, or something else ended it.
        return ReplacementPlan(row=care.row, pause=care.pause)
    others, late = _others(care.replica, seats), at - care.begun >= ward.start_s
    enough = max(1, ward.healthy) if seat.ailment.fatal else ward.aimed
    if others >= enough or not seat.ready or (late and seat.ailment.fatal):
        return msgspec.structs.replace(care, told=at)
    # Where no successor can be had, a slow one is better than none.
    return _ended(care, at) if late else care


def _parted(
    care: ReplacementPlan, seats: Sequence[Slot], ward: ReplacementState, at: float
) -> ReplacementPlan:
    """Wait until it is gone, and as long as it takes others to see that."""
    assert care.told is not None
    if care.gone is not None:
        return _ended(care, care.gone) if at - care.gone >= PARTING_S else care
    if all(seat.id != care.replica for seat in seats):
        return msgspec.structs.replace(care, gone=at)
    return _ended(care, at) if at - care.told >= ward.drain_s + LATE_S else care


def _replaced(replica: str, why: str) -> str:
    return f"{replica}: {why}; it is being replaced"


def _ended(care: ReplacementPlan, at: float) -> ReplacementPlan:
    row = care.row + 1
    return ReplacementPlan(row=row, pause=at + PAUSE.delay_s(row))


def _others(replica: str, seats: Sequence[Slot]) -> int:
    """How many others serve that can be trusted."""
    return sum(
        seat.ready and seat.id != replica and not (seat.ailment is not None and seat.ailment.fatal)
        for seat in seats
    )
