"""Replacement of replicas whose GPUs fail or are throttled.

The replica's host drains it and ends, and the actuator starts another; where there is room, the successor
starts first. One replica of a model is replaced at a time, with a growing pause: the next may get the same
GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from policy.stats.backoff import Backoff
from policy.wire.controller_reports import GpuReport, is_of_card

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


class ReplicaGpuHealth(NamedTuple):
    """The last GPU report of a replica, at ``reported_at``, and since when it has been throttled."""

    reported_at: float
    throttled_since: float | None = None
    xid: int = 0
    card: str = ""


class ReplicaFault(NamedTuple):
    """Why a replica should be replaced; a ``fatal`` condition may give wrong answers, others slow ones."""

    why: str
    fatal: bool


def observe(before: ReplicaGpuHealth | None, report: GpuReport, at: float) -> ReplicaGpuHealth:
    """The health after a report; an error of a GPU stays until the replica has ended."""
    before = before or ReplicaGpuHealth(at)
    since = before.throttled_since if at - before.reported_at <= UNHEARD_S else None
    since = None if not report.reasons & HARDWARE else at if since is None else since
    failed = report if is_of_card(report.xid) else before
    return ReplicaGpuHealth(at, since, failed.xid, failed.card)


def condition(health: ReplicaGpuHealth, at: float) -> ReplicaFault | None:
    """The condition of a replica, if it is unhealthy."""
    reported_at, since, xid, card = health
    if xid:
        return ReplicaFault(f"XID {xid}" + (f" on {card}" if card else ""), fatal=True)
    if since is not None and reported_at - since >= SLOWED_S and at - reported_at <= UNHEARD_S:
        return ReplicaFault(f"throttled by hardware for {SLOWED_S:.0f} s", fatal=False)
    return None


class ReplicaSlot(NamedTuple):
    """One replica of the serving layer, with its condition."""

    id: str
    ready: bool
    condition: ReplicaFault | None = None

    @property
    def failed(self) -> bool:
        """Whether its condition is fatal."""
        return self.condition is not None and self.condition.fatal


class ReplacementState(NamedTuple):
    """The state of a model at ``at``: its ``slots``, the ``desired`` count, and the least ready replicas.

    ``room`` is whether one more fits, ``busy`` why none is replaced now; ``start_s`` and ``drain_s`` are
    timeouts.
    """

    at: float
    slots: Sequence[ReplicaSlot]
    desired: int
    min_healthy: int
    room: bool
    busy: str = ""
    start_s: float = 600.0
    drain_s: float = 30.0

    def others(self, replica: str) -> int:
        """How many other replicas serve without a fatal condition."""
        return sum(slot.ready and slot.id != replica and not slot.failed for slot in self.slots)


class ReplacementPlan(NamedTuple):
    """The current replacement, if any, and the back-off of the last.

    ``replica`` is being replaced since ``begun``, with one ``more`` beside it where there is room; its drain
    began at ``drain_at``, and it had ended at ``ended_at``. ``row`` counts replacements in a row; the next
    waits until ``pause``. ``note`` is for operators.
    """

    replica: str = ""
    why: str = ""
    begun: float = 0.0
    more: bool = False
    drain_at: float | None = None
    ended_at: float | None = None
    row: int = 0
    pause: float = 0.0
    note: str = ""

    @property
    def leaves(self) -> str:
        """The replica that has to drain."""
        return self.replica if self.drain_at is not None and self.ended_at is None else ""


def step(before: ReplacementPlan, state: ReplacementState) -> ReplacementPlan:
    """The next step of the replacement, or the first of another."""
    plan = before
    if plan.replica and plan.drain_at is None:
        plan = _await_successor(_prefer_failed(plan, state), state)
    elif plan.replica:
        plan = _await_end(plan, state)
    return plan if plan.replica else _begin(plan, state)


def _prefer_failed(plan: ReplacementPlan, state: ReplacementState) -> ReplacementPlan:
    """Replace a replica with a failed GPU before one that is only slow."""
    failed = {
        slot.id: slot.condition.why for slot in state.slots if slot.ready and slot.condition and slot.failed
    }
    if not failed or plan.replica in failed:
        return plan
    replica = min(failed)
    return plan._replace(replica=replica, begun=state.at, **_described(replica, failed[replica]))


def _begin(before: ReplacementPlan, state: ReplacementState) -> ReplacementPlan:
    """Begin with the worst unhealthy replica, if one may leave."""
    # The back-off ends when the successor has been healthy for the same time again.
    over = not before.row or state.at >= before.pause + PAUSE.delay_s(before.row)
    waits = ReplacementPlan() if over else ReplacementPlan(row=before.row, pause=before.pause)
    unhealthy = [
        (not slot.failed, slot.id, slot.condition) for slot in state.slots if slot.ready and slot.condition
    ]
    if not unhealthy:
        return waits
    _, replica, found = min(unhealthy)
    note = f"{replica}: {found.why}"
    if waits.row and state.at < waits.pause:
        pause = f"{waits.row} replaced in a row: the next in {waits.pause - state.at:.0f} s"
        return waits._replace(note=f"{note}; {pause}")
    if state.busy and not found.fatal:
        return waits._replace(note=f"{note}; it is replaced when {state.busy}")
    more = state.room and not state.busy
    begun = waits._replace(replica=replica, begun=state.at, more=more, **_described(replica, found.why))
    if more:
        return _await_successor(begun, state)
    if found.fatal or state.others(replica) >= max(1, state.min_healthy):
        return begun._replace(drain_at=state.at)
    return waits._replace(note=f"{note}; kept: too few other replicas serve")


def _await_successor(plan: ReplacementPlan, state: ReplacementState) -> ReplacementPlan:
    """Drain it once its successor is ready, or with a fatal error once enough others are."""
    slot = next((slot for slot in state.slots if slot.id == plan.replica), None)
    if slot is None or slot.condition is None:
        # It recovered, or something else ended it.
        return ReplacementPlan(row=plan.row, pause=plan.pause)
    late = state.at - plan.begun >= state.start_s
    enough = max(1, state.min_healthy) if slot.failed else state.desired
    if state.others(plan.replica) >= enough or not slot.ready or (late and slot.failed):
        return plan._replace(drain_at=state.at)
    # Without a successor a slow replica is better than none.
    return _ended(plan, state.at) if late else plan


def _await_end(plan: ReplacementPlan, state: ReplacementState) -> ReplacementPlan:
    """Wait until it has ended, and the actuator has seen it."""
    at = state.at
    assert plan.drain_at is not None
    if plan.ended_at is not None:
        return _ended(plan, plan.ended_at) if at - plan.ended_at >= PARTING_S else plan
    if all(slot.id != plan.replica for slot in state.slots):
        return plan._replace(ended_at=at)
    return _ended(plan, at) if at - plan.drain_at >= state.drain_s + LATE_S else plan


def _described(replica: str, why: str) -> dict[str, Any]:
    return {"why": why, "note": f"{replica}: {why}; it is being replaced"}


def _ended(plan: ReplacementPlan, at: float) -> ReplacementPlan:
    row = plan.row + 1
    return ReplacementPlan(row=row, pause=at + PAUSE.delay_s(row))
