"""Which replicas leave because of their cards: what they tell, and what is done about it."""

from __future__ import annotations

from collections.abc import Callable

from policy.config.gpu_sharing import gpu_group_of
from policy.scaling.replacement import (
    UNHEARD_S,
    GpuHealth,
    ReplacementPlan,
    ReplacementState,
    Slot,
    condition,
    observe,
    step,
)
from policy.types import Replica, ReplicaPhase
from policy.wire.heartbeat import Heartbeat
from serve.state.observed import ObservedState
from serve.state.replica_registry import ReplicaRegistry
from serve.state.targets import Target


class ReplicaReplacement:
    """One for all models; ``now`` are the seconds of the clock that never goes back.

    A controller that comes back learns of errors again with the first beats, and of what is slow in a minute.
    """

    def __init__(
        self,
        registry: ReplicaRegistry,
        observation: ObservedState,
        now: Callable[[], float],
        event: Callable[[str], None],
    ) -> None:
        self._registry = registry
        self._observation = observation
        self._now = now
        self._event = event
        self._pulses: dict[str, GpuHealth] = {}
        self._cares: dict[str, ReplacementPlan] = {}

    def beat(self, beat: Heartbeat) -> None:
        """A replica tells how its cards are."""
        replica, at = beat.replica, self._now()
        if replica.state is ReplicaPhase.STOPPED:
            self._pulses.pop(replica.id, None)
        elif beat.power is not None:
            if replica.id not in self._pulses:
                heard = self._pulses.items()
                self._pulses = {name: pulse for name, pulse in heard if at - pulse.heard <= UNHEARD_S}
            self._pulses[replica.id] = observe(self._pulses.get(replica.id), beat.power, at)

    def leave(self, replica: Replica) -> str:
        """Why the replica has to leave, or an empty string."""
        care = self._cares.get(replica.model)
        return care.why if care is not None and care.leaves == replica.id else ""

    def note(self, model: str) -> str:
        """What people should know of the model's cards."""
        return self._cares[model].note if model in self._cares else ""

    def look(self, target: Target, has_room: Callable[[], bool]) -> int:
        """Take the next step; returns how many replicas are wanted beside those aimed for."""
        model, at = target.spec.name, self._now()
        before, seats = self._cares.get(model, ReplacementPlan()), self._seats(target, at)
        if before == ReplacementPlan() and not any(seat.ailment for seat in seats):
            return 0
        bed = gpu_group_of(target.spec)
        if not target.aim.count or (bed is not None and target.aim.shape in bed.engines):
            after = ReplacementPlan(note=_in_bed(seats) if target.aim.count else "")
        else:
            after = step(before, seats, self._ward(target, before, has_room), at)
        self._cares[model] = after
        self._tell(model, before, after)
        return int(after.more)

    def _seats(self, target: Target, at: float) -> list[Slot]:
        found = []
        for replica in self._registry.of(target.key()):
            pulse = self._pulses.get(replica.id)
            ails = None if pulse is None else condition(pulse, at)
            found.append(Slot(replica.id, replica.state is ReplicaPhase.READY, ails))
        return found

    def _ward(
        self, target: Target, before: ReplacementPlan, has_room: Callable[[], bool]
    ) -> ReplacementState:
        control, layers = target.spec.control, self._observation.layers(target.spec.name)
        others = any(layer.occupied for key, layer in layers.items() if key != target.key())
        return ReplacementState(
            aimed=target.aim.count,
            healthy=min(control.scale.min_healthy, target.aim.count),
            # Asked for only where something begins: it takes a look at every model.
            room=not before.replica and has_room(),
            busy="the switch is over" if others else "",
            start_s=control.start_timeout_s,
            drain_s=control.mode.drain_timeout_s,
        )

    def _tell(self, model: str, before: ReplacementPlan, after: ReplacementPlan) -> None:
        if after.replica and after.replica != before.replica:
            how = ", after a successor for which there is room" if after.more else ""
            self._event(f"{model}: {after.replica} is replaced{how}: {after.why}")
        if after.leaves and not before.leaves:
            self._event(f"{model}: {after.replica} has to leave: {after.why}")
        if not after.replica and after.note and after.note.partition(";")[0] != before.note.partition(";")[0]:
            self._event(f"{model}: {after.note}")


def _in_bed(seats: list[Slot]) -> str:
    ill = next((seat for seat in seats if seat.ailment is not None), None)
    if ill is None or ill.ailment is None:
        return ""
    return f"{ill.id}: {ill.ailment.why}; it stays: the GPUs of a bed are not exchanged"
