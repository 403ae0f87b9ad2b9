"""An actuator without processes: its replicas are only said to be there, so tests need not wait for any."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from policy.config import ModelSpec
from policy.errors import ActuatorFailed
from policy.plan import LayerKey
from policy.switching import MAX_FAILURES
from policy.types import Load, Replica, ReplicaState
from serve.actuator.port import Held
from serve.weights import Weights


@dataclass
class MemoryCluster:
    """What outlives an actuator. Each change of a replica goes to ``beat``.

    Starts and drains finish at once, or by :meth:`ready` and :meth:`drained` where ``slow`` is set;
    starts of layers in ``failing`` fail with the reason given there; ``down`` refuses every call.
    """

    beat: Callable[[Replica], None]
    slow: bool = False
    failing: dict[LayerKey, str] = field(default_factory=dict)
    down: str = ""
    held: dict[LayerKey, Held] = field(default_factory=dict)
    replicas: dict[str, Replica] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def of(self, key: LayerKey, *states: ReplicaState) -> list[Replica]:
        """The layer's replicas in one of ``states``, oldest first."""
        found = (r for r in self.replicas.values() if (r.model, r.shape, r.generation) == _parts(key))
        return [replica for replica in found if replica.state in states]

    def beat_all(self) -> None:
        """What hosts do twice a second."""
        for replica in self.replicas.values():
            self.beat(replica)

    def ready(self) -> None:
        """Let every start finish."""
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaState.STARTING:
                key = LayerKey(replica.model, replica.shape, replica.generation)
                self._fail(replica, key) if key in self.failing else self._become(replica, ReplicaState.READY)

    def drained(self) -> None:
        """Let every drain finish."""
        for replica in list(self.replicas.values()):
            if replica.state is ReplicaState.DRAINING:
                self._become(replica, ReplicaState.STOPPED)

    def settle(self, key: LayerKey) -> None:
        """Start or drain replicas until the layer has the count that is asked for; newest leave first."""
        wanted = self.held[key].wanted
        staying = self.of(key, ReplicaState.STARTING, ReplicaState.READY)
        for _ in range(wanted - len(staying)):
            self._start(key)
        for replica in staying[wanted:]:
            self._become(replica, ReplicaState.DRAINING)
        if not self.slow:
            self.ready()
            self.drained()

    def _start(self, key: LayerKey) -> None:
        number = next(self._ids)
        model, shape, generation = _parts(key)
        replica = Replica(
            id=f"{model}-{shape}-g{generation}-{number}",
            model=model,
            shape=shape,
            generation=generation,
            state=ReplicaState.STARTING,
            load=Load(at=0.0),
            pid=number,
            start_s=1.0,
        )
        self._become(replica, ReplicaState.STARTING)

    def _fail(self, replica: Replica, key: LayerKey) -> None:
        reason = self.failing[key]
        self.held[key] = msgspec.structs.replace(self.held[key], trouble=reason)
        failed = msgspec.structs.replace(replica, failures=MAX_FAILURES, reason=reason)
        self._become(failed, ReplicaState.STOPPED)

    def _become(self, replica: Replica, state: ReplicaState) -> None:
        replica = msgspec.structs.replace(replica, state=state)
        self.replicas[replica.id] = replica
        if state is ReplicaState.STOPPED:
            del self.replicas[replica.id]
        self.beat(replica)


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
