"""An actuator whose replicas are records in memory, so that tests wait for no process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from policy.config.deployment import ModelSpec
from policy.config.shared_gpus import GpuGroup, gpu_group_of
from policy.errors import ActuatorFailed
from policy.scaling.reconcile_steps import MAX_FAILURES, LayerKey
from policy.types import Replica, ReplicaLoad, ReplicaPhase, StartPath
from policy.wire.heartbeat import GpuCommand, HeartbeatResponse
from serve.actuator.interface import ActuatorLayer, NodeResources
from serve.host.weight_verification import ResolvedWeights


@dataclass
class MemoryCluster:
    """Replicas that outlive an actuator. ``beat`` is called with each change of a replica.

    Starts and drains finish at once, or by :meth:`ready` and :meth:`drained` where ``slow`` is set;
    starts of layers in ``failing`` fail with the reason given there; ``down`` refuses every call, ``refuses``
    every order of a count. A shared
    GPU group starts with its engines asleep, and follows the orders of heartbeat answers in
    :meth:`beat_all`. A replica that is ordered to leave drains and is replaced.
    """

    beat: Callable[[Replica], HeartbeatResponse | None]
    slow: bool = False
    failing: dict[LayerKey, str] = field(default_factory=dict)
    down: str = ""
    refuses: str = ""
    nodes: tuple[NodeResources, ...] = ()
    held: dict[LayerKey, ActuatorLayer] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    groups: dict[LayerKey, GpuGroup] = field(default_factory=dict)
    orders: dict[str, GpuCommand] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def of(self, key: LayerKey, *states: ReplicaPhase) -> list[Replica]:
        """The layer's replicas in one of ``states``, oldest first."""
        found = (r for r in self.replicas.values() if (r.model, r.shape, r.generation) == _parts(key))
        return [replica for replica in found if replica.state in states]

    def beat_all(self) -> None:
        """One heartbeat of every host."""
        for replica in list(self.replicas.values()):
            if replica.id in self.replicas:
                self._send_heartbeat(replica)
        for key in self.groups:
            self._follow_orders(key)

    def ready(self) -> None:
        """Let every start finish."""
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaPhase.STARTING and not self._blocked(replica):
                key = LayerKey.of(replica)
                self._fail(replica, key) if key in self.failing else self.become(replica, ReplicaPhase.READY)

    def drained(self) -> None:
        """Let every drain finish."""
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaPhase.DRAINING:
                stays = self._group(replica) in self.held
                self.become(replica, ReplicaPhase.ASLEEP if stays else ReplicaPhase.STOPPED)
                key = LayerKey.of(replica)
                if replica.reason and key in self.held and not stays:
                    # A replica that left as ordered is replaced.
                    self.settle(key)

    def settle(self, key: LayerKey) -> None:
        """Start or drain replicas until the layer has its desired count; the newest are removed first."""
        wanted = self.held[key].wanted
        if key in self.groups:
            self._make_group(key, bool(wanted))
            return
        staying = self.of(key, ReplicaPhase.STARTING, ReplicaPhase.READY)
        for _ in range(wanted - len(staying)):
            self._start(key)
        for replica in staying[wanted:]:
            self.become(replica, ReplicaPhase.DRAINING)
        if not self.slow:
            self.ready()
            self.drained()

    def _make_group(self, key: LayerKey, wanted: bool) -> None:
        engines = [replica for replica in self.replicas.values() if self._group(replica) == key]
        if not wanted:
            for replica in engines:
                self.become(replica, ReplicaPhase.STOPPED)
        elif not engines:
            group = self.groups[key]
            for shape, count in group.engines.items():
                gpus = group.gpus // count
                for index in range(count):
                    cards = tuple(range(index * gpus, (index + 1) * gpus))
                    self._start(LayerKey(key.model, shape, key.generation), ReplicaPhase.ASLEEP, cards)

    def _follow_orders(self, key: LayerKey) -> None:
        """Follow the last orders of a group: first sleep, then wake-ups that are not blocked."""
        engines = [replica for replica in self.replicas.values() if self._group(replica) == key]
        serves = {each.id for each in engines if self.orders.get(each.id) is GpuCommand.SERVE}
        for replica in engines:
            if replica.id not in serves and replica.state is ReplicaPhase.STARTING:
                self.become(replica, ReplicaPhase.ASLEEP)
            elif replica.id not in serves and replica.state is ReplicaPhase.READY:
                self.become(replica, ReplicaPhase.DRAINING)
            elif replica.id in serves and replica.state is ReplicaPhase.ASLEEP:
                woken = {"start_s": replica.wake_s, "start_path": StartPath.SLEEPING}
                self.become(msgspec.structs.replace(replica, **woken), ReplicaPhase.STARTING)
        if not self.slow:
            self.drained()
            self.ready()

    def _blocked(self, replica: Replica) -> bool:
        key = self._group(replica)
        return key is not None and any(
            other.id != replica.id
            and not set(other.cards).isdisjoint(replica.cards)
            and other.state in (ReplicaPhase.READY, ReplicaPhase.DRAINING)
            for other in self.replicas.values()
            if self._group(other) == key
        )

    def _group(self, replica: Replica) -> LayerKey | None:
        for key, group in self.groups.items():
            same = (key.model, key.generation) == (replica.model, replica.generation)
            if same and replica.shape in group.engines:
                return key
        return None

    def _start(
        self, key: LayerKey, state: ReplicaPhase = ReplicaPhase.STARTING, cards: tuple[int, ...] = ()
    ) -> None:
        number = next(self._ids)
        model, shape, generation = _parts(key)
        replica = Replica(
            id=f"{model}-{shape}-g{generation}-{number}",
            model=model,
            shape=shape,
            generation=generation,
            state=state,
            load=ReplicaLoad(at=0.0),
            pid=number,
            start_s=1.0,
            url="http://127.0.0.1:1" if cards else "",
            wake_s=0.5 if cards else None,
            cards=cards,
        )
        self.become(replica, state)

    def _fail(self, replica: Replica, key: LayerKey) -> None:
        reason = self.failing[key]
        if self._group(replica) is not None:
            # This engine fails repeatedly; the others do not.
            failed = msgspec.structs.replace(replica, failures=MAX_FAILURES, reason=reason)
            self.become(failed, ReplicaPhase.STARTING)
            return
        self.held[key] = msgspec.structs.replace(self.held[key], trouble=reason)
        failed = msgspec.structs.replace(replica, failures=MAX_FAILURES, reason=reason)
        self.become(failed, ReplicaPhase.STOPPED)

    def become(self, replica: Replica, state: ReplicaPhase) -> None:
        replica = msgspec.structs.replace(replica, state=state)
        self.replicas[replica.id] = replica
        if state is ReplicaPhase.STOPPED:
            del self.replicas[replica.id]
        self._send_heartbeat(replica)

    def _send_heartbeat(self, replica: Replica) -> None:
        orders = self.beat(replica)
        if orders is not None and orders.leave and self.replicas.get(replica.id) == replica:
            if replica.state is ReplicaPhase.READY:
                left = msgspec.structs.replace(replica, reason=orders.leave)
                self.become(left, ReplicaPhase.DRAINING)
                if not self.slow:
                    self.drained()
            return
        if orders is not None and orders.gpus is not None:
            self.orders[replica.id] = orders.gpus


class MemoryActuator:
    """The actuator port over a :class:`MemoryCluster`."""

    name = "memory"

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        self._answer()
        return dict(self._cluster.held)

    async def nodes(self) -> Sequence[NodeResources]:
        return self._cluster.nodes

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        self._take_order()
        if key not in self._cluster.held:
            if (group := gpu_group_of(model)) is not None and key.shape == group.shape:
                self._cluster.groups[key] = group
            self._cluster.held[key] = ActuatorLayer(wanted=count, digest=digest)
            self._cluster.settle(key)

    async def scale(self, key: LayerKey, count: int) -> None:
        self._take_order()
        if key not in self._cluster.held:
            raise ActuatorFailed(f"there is no layer {key} to scale")
        self._cluster.held[key] = msgspec.structs.replace(self._cluster.held[key], wanted=count, trouble="")
        self._cluster.settle(key)

    async def kill(self, key: LayerKey, replica: str) -> None:
        self._answer()
        if self._cluster.replicas.pop(replica, None) is not None:
            self._cluster.settle(key)

    async def delete(self, key: LayerKey) -> None:
        if key in await self.layers():
            await self.scale(key, 0)
            del self._cluster.held[key]

    async def stop(self) -> None:
        for key in await self.layers():
            await self.delete(key)

    async def close(self) -> None:
        """Nothing to close."""

    def _take_order(self) -> None:
        self._answer()
        if self._cluster.refuses:
            raise ActuatorFailed(self._cluster.refuses)

    def _answer(self) -> None:
        if self._cluster.down:
            raise ActuatorFailed(self._cluster.down)


def _parts(key: LayerKey) -> tuple[str, str, int]:
    return key.model, key.shape, key.generation
