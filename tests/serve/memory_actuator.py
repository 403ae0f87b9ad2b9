"""An actuator without processes: its replicas are only said to be there, so tests need not wait for any."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from policy.config.deployment import ModelSpec
from policy.config.shared_gpus import GpuGroup, gpu_group_of
from policy.errors import ActuatorFailed
from policy.scaling.rollout import MAX_FAILURES, LayerKey
from policy.types import Load, Replica, ReplicaPhase, StartPath
from policy.wire.heartbeat import Orders
from serve.actuator.interface import Held
from serve.host.weight_verification import Weights


@dataclass
class MemoryCluster:
    """What outlives an actuator. Each change of a replica goes to ``beat``.

    Starts and drains finish at once, or by :meth:`ready` and :meth:`drained` where ``slow`` is set;
    starts of layers in ``failing`` fail with the reason given there; ``down`` refuses every call. A bed has
    its engines asleep, and does with them what the answers to beats say, whenever all beat. A replica that is
    told to leave drains, and another one is started.
    """

    beat: Callable[[Replica], Orders | None]
    slow: bool = False
    failing: dict[LayerKey, str] = field(default_factory=dict)
    down: str = ""
    held: dict[LayerKey, Held] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    beds: dict[LayerKey, GpuGroup] = field(default_factory=dict)
    _awake: dict[LayerKey, dict[str, int]] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def of(self, key: LayerKey, *states: ReplicaPhase) -> list[Replica]:
        """The layer's replicas in one of ``states``, oldest first."""
        found = (r for r in self.replicas.values() if (r.model, r.shape, r.generation) == _parts(key))
        return [replica for replica in found if replica.state in states]

    def beat_all(self) -> None:
        """What hosts do twice a second."""
        for replica in list(self.replicas.values()):
            if replica.id in self.replicas:
                self._say(replica)
        for key in self.beds:
            self._turn_over(key)

    def ready(self) -> None:
        """Let every start finish."""
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaPhase.STARTING and not self._blocked(replica):
                key = LayerKey.of(replica)
                self._fail(replica, key) if key in self.failing else self._become(replica, ReplicaPhase.READY)

    def drained(self) -> None:
        """Let every drain finish."""
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaPhase.DRAINING:
                stays = self._bed(replica) in self.held
                self._become(replica, ReplicaPhase.ASLEEP if stays else ReplicaPhase.STOPPED)
                key = LayerKey.of(replica)
                if replica.reason and key in self.held and not stays:
                    # Who left as it was told is replaced.
                    self.settle(key)

    def settle(self, key: LayerKey) -> None:
        """Start or drain replicas until the layer has the count that is asked for; newest leave first."""
        wanted = self.held[key].wanted
        if key in self.beds:
            self._make_bed(key, bool(wanted))
            return
        staying = self.of(key, ReplicaPhase.STARTING, ReplicaPhase.READY)
        for _ in range(wanted - len(staying)):
            self._start(key)
        for replica in staying[wanted:]:
            self._become(replica, ReplicaPhase.DRAINING)
        if not self.slow:
            self.ready()
            self.drained()

    def _make_bed(self, key: LayerKey, wanted: bool) -> None:
        engines = [replica for replica in self.replicas.values() if self._bed(replica) == key]
        if not wanted:
            for replica in engines:
                self._become(replica, ReplicaPhase.STOPPED)
        elif not engines:
            for shape, count in self.beds[key].engines.items():
                for _ in range(count):
                    self._start(LayerKey(key.model, shape, key.generation), ReplicaPhase.ASLEEP)

    def _turn_over(self, key: LayerKey) -> None:
        """Do what was last said of a bed: first who shall sleep, then who shall wake and may."""
        awake = self._awake.get(key, {})
        for shape in self.beds[key].engines:
            engines = self.of(LayerKey(key.model, shape, key.generation), *ReplicaPhase)
            for replica in engines[awake.get(shape, 0) :]:
                if replica.state is ReplicaPhase.STARTING:
                    self._become(replica, ReplicaPhase.ASLEEP)
                elif replica.state is ReplicaPhase.READY:
                    self._become(replica, ReplicaPhase.DRAINING)
            for replica in engines[: awake.get(shape, 0)]:
                if replica.state is ReplicaPhase.ASLEEP:
                    woken = {"start_s": replica.wake_s, "start_path": StartPath.SLEEPING}
                    self._become(msgspec.structs.replace(replica, **woken), ReplicaPhase.STARTING)
        if not self.slow:
            self.drained()
            self.ready()

    def _blocked(self, replica: Replica) -> bool:
        key = self._bed(replica)
        return key is not None and any(
            other.shape != replica.shape and other.state in (ReplicaPhase.READY, ReplicaPhase.DRAINING)
            for other in self.replicas.values()
            if self._bed(other) == key
        )

    def _bed(self, replica: Replica) -> LayerKey | None:
        for key, bed in self.beds.items():
            same = (key.model, key.generation) == (replica.model, replica.generation)
            if same and replica.shape in bed.engines:
                return key
        return None

    def _start(self, key: LayerKey, state: ReplicaPhase = ReplicaPhase.STARTING) -> None:
        number = next(self._ids)
        model, shape, generation = _parts(key)
        replica = Replica(
            id=f"{model}-{shape}-g{generation}-{number}",
            model=model,
            shape=shape,
            generation=generation,
            state=state,
            load=Load(at=0.0),
            pid=number,
            start_s=1.0,
            wake_s=None if state is ReplicaPhase.STARTING else 0.5,
        )
        self._become(replica, state)

    def _fail(self, replica: Replica, key: LayerKey) -> None:
        reason = self.failing[key]
        if self._bed(replica) is not None:
            # It fails again and again beside those that do not.
            failed = msgspec.structs.replace(replica, failures=MAX_FAILURES, reason=reason)
            self._become(failed, ReplicaPhase.STARTING)
            return
        self.held[key] = msgspec.structs.replace(self.held[key], trouble=reason)
        failed = msgspec.structs.replace(replica, failures=MAX_FAILURES, reason=reason)
        self._become(failed, ReplicaPhase.STOPPED)

    def _become(self, replica: Replica, state: ReplicaPhase) -> None:
        replica = msgspec.structs.replace(replica, state=state)
        self.replicas[replica.id] = replica
        if state is ReplicaPhase.STOPPED:
            del self.replicas[replica.id]
        self._say(replica)

    def _say(self, replica: Replica) -> None:
        orders, key = self.beat(replica), self._bed(replica)
        if orders is not None and orders.leave and self.replicas.get(replica.id) == replica:
            if replica.state is ReplicaPhase.READY:
                left = msgspec.structs.replace(replica, reason=orders.leave)
                self._become(left, ReplicaPhase.DRAINING)
                if not self.slow:
                    self.drained()
            return
        if key is not None and orders is not None and orders.awake is not None:
            self._awake[key] = orders.awake


class MemoryActuator:
    """The actuator port over a :class:`MemoryCluster`."""

    name = "memory"

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    async def layers(self) -> Mapping[LayerKey, Held]:
        self._answer()
        return dict(self._cluster.held)

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: Weights | None, digest: str, count: int
    ) -> None:
        self._answer()
        if key not in self._cluster.held:
            if (bed := gpu_group_of(model)) is not None and key.shape == bed.shape:
                self._cluster.beds[key] = bed
            self._cluster.held[key] = Held(wanted=count, digest=digest)
            self._cluster.settle(key)

    async def scale(self, key: LayerKey, count: int) -> None:
        self._answer()
        if key not in self._cluster.held:
            raise ActuatorFailed(f"there is no layer {key} to scale")
        self._cluster.held[key] = msgspec.structs.replace(self._cluster.held[key], wanted=count, trouble="")
        self._cluster.settle(key)

    async def delete(self, key: LayerKey) -> None:
        if key in await self.layers():
            await self.scale(key, 0)
            del self._cluster.held[key]

    async def stop(self) -> None:
        for key in await self.layers():
            await self.delete(key)

    async def close(self) -> None:
        """There is nothing to let go of."""

    def _answer(self) -> None:
        if self._cluster.down:
            raise ActuatorFailed(self._cluster.down)


def _parts(key: LayerKey) -> tuple[str, str, int]:
    return key.model, key.shape, key.generation
