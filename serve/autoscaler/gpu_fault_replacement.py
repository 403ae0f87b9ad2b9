"""Replaces replicas whose GPUs fail or are throttled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from policy.config.shared_gpus import gpu_group_of
from policy.scaling import gpu_fault_replacement
from policy.scaling.gpu_fault_replacement import (
    UNHEARD_S,
    ReplacementPlan,
    ReplacementState,
    ReplicaGpuHealth,
    ReplicaSlot,
)
from policy.types import Replica, ReplicaPhase
from policy.wire.heartbeat import Heartbeat
from serve.state.desired_state import ModelTarget
from serve.state.observed_state import ObservedState
from serve.state.replica_registry import ReplicaRegistry


@dataclass(eq=False)
class ReplicaReplacement:
    """One for all models; ``now`` returns seconds of a clock that never goes back.

    A restarted controller learns of GPU errors with the first heartbeats, and of throttling within a minute.
    """

    registry: ReplicaRegistry
    observed: ObservedState
    now: Callable[[], float]
    event: Callable[[str], None]
    _health: dict[str, ReplicaGpuHealth] = field(default_factory=dict, init=False)
    _plans: dict[str, ReplacementPlan] = field(default_factory=dict, init=False)

    def beat(self, beat: Heartbeat) -> None:
        """Take the GPU state that a replica reports."""
        replica, at = beat.replica, self.now()
        if replica.state is ReplicaPhase.STOPPED:
            self._health.pop(replica.id, None)
        elif beat.gpus is not None:
            if replica.id not in self._health:
                recent = self._health.items()
                self._health = {
                    name: health for name, health in recent if at - health.reported_at <= UNHEARD_S
                }
            self._health[replica.id] = gpu_fault_replacement.observe(
                self._health.get(replica.id), beat.gpus, at
            )

    def leave(self, replica: Replica) -> str:
        """Why the replica has to drain, or an empty string."""
        plan = self._plans.get(replica.model)
        return plan.why if plan is not None and plan.leaves == replica.id else ""

    def is_unhealthy(self, replica: Replica) -> bool:
        """Whether a GPU of the replica fails or is throttled."""
        health = self._health.get(replica.id)
        return health is not None and gpu_fault_replacement.condition(health, self.now()) is not None

    def note(self, model: str) -> str:
        """A note for operators about the GPUs of the model, or an empty string."""
        return self._plans[model].note if model in self._plans else ""

    def step(self, target: ModelTarget, has_room: Callable[[], bool]) -> int:
        """Take the next step; returns how many replicas are needed on top of the desired count."""
        model, at = target.spec.name, self.now()
        before, slots = self._plans.get(model, ReplacementPlan()), self._slots(target, at)
        if before == ReplacementPlan() and not any(slot.condition for slot in slots):
            return 0
        if target.aim.count:
            # In a shared GPU group the successor has the same GPUs. Else room is checked only if a
            # replacement may begin: it looks at every model.
            group = gpu_group_of(target.spec)
            alone = group is None or target.aim.shape not in group.engines
            room = alone and not before.replica and has_room()
            after = gpu_fault_replacement.step(before, self._state(target, slots, room, at))
        else:
            after = ReplacementPlan()
        self._plans[model] = after
        self._announce(model, before, after)
        return int(after.more)

    def _slots(self, target: ModelTarget, at: float) -> list[ReplicaSlot]:
        found = []
        for replica in self.registry.of(target.key()):
            health = self._health.get(replica.id)
            condition_now = None if health is None else gpu_fault_replacement.condition(health, at)
            found.append(ReplicaSlot(replica.id, replica.state is ReplicaPhase.READY, condition_now))
        return found

    def _state(
        self, target: ModelTarget, slots: list[ReplicaSlot], room: bool, at: float
    ) -> ReplacementState:
        control, layers = target.spec.control, self.observed.layers(target.spec.name)
        others = any(layer.occupied for key, layer in layers.items() if key != target.key())
        return ReplacementState(
            at=at,
            slots=slots,
            desired=target.aim.count,
            min_healthy=min(control.scale.min_healthy, target.aim.count),
            room=room,
            busy="the switch is over" if others else "",
            start_s=control.start_timeout_s,
            drain_s=control.mode.drain_timeout_s,
        )

    def _announce(self, model: str, before: ReplacementPlan, after: ReplacementPlan) -> None:
        if after.replica and after.replica != before.replica:
            how = " after an extra replica is ready" if after.more else ""
            self.event(f"{model}: {after.replica} is replaced{how}: {after.why}")
        if after.leaves and not before.leaves:
            self.event(f"{model}: {after.replica} drains: {after.why}")
        if not after.replica and after.note and after.note.partition(";")[0] != before.note.partition(";")[0]:
            self.event(f"{model}: {after.note}")
