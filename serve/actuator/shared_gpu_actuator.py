"""Layers of a shared GPU group, over any actuator: only the group is deployed, and counts are orders to it.

For the actuator below, a group is one replica of the largest shape. The number of engines of each layer that
are awake is stored on disk first; the answers to heartbeats are the orders of the engines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from policy.config.deployment import ModelSpec
from policy.config.engine_revision import digest as digest_of
from policy.config.shared_gpus import GpuGroup, gpu_group_of
from policy.errors import ActuatorFailed
from policy.scaling.gpu_group_commands import GroupEngine, chosen_engines, gpu_commands, is_prepared
from policy.scaling.reconcile_steps import MAX_FAILURES, LayerKey
from policy.types import Replica, ReplicaPhase
from policy.wire.heartbeat import GpuCommand
from serve.actuator.interface import Actuator, ActuatorLayer, NodeResources
from serve.host.weight_verification import ResolvedWeights
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")


class EngineKey(NamedTuple):
    """An engine of a group, whichever process runs it."""

    layer: LayerKey
    cards: tuple[int, ...]


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A group and its layer ``key`` in the actuator below; ``wanted`` is the awake count of each shape.

    A group without layers is being deleted. ``served`` is whether an engine of it was ready once.
    """

    key: LayerKey
    plan: GpuGroup
    wanted: dict[str, int]
    digests: dict[str, str]
    served: bool = False


class SharedGpuActuator:
    """The actuator port over another one; layers outside a group pass through.

    A group whose engines are all asleep keeps its GPUs, unless another revision of its model needs them.
    """

    def __init__(
        self,
        actuator: Actuator,
        state: StateDir,
        replicas: Callable[[LayerKey], Sequence[Replica]],
        is_unhealthy: Callable[[Replica], bool] = lambda replica: False,
    ) -> None:
        """``replicas`` returns the replicas of a layer, as their heartbeats describe them.

        Of a replica with a GPU that ``is_unhealthy``, another one serves in its place if there is any.
        """
        self.name = actuator.name
        self._inner = actuator
        self._state = state
        self._replicas = replicas
        self._is_unhealthy = is_unhealthy
        # The replicas that were last ordered to serve, and the engines whose last starts failed.
        self._chosen: set[str] = set()
        self._failed: set[EngineKey] = set()
        self._records = {record.key: record for record in self._read()}

    def order(self, replica: Replica) -> GpuCommand | None:
        """What a replica that sent a heartbeat does with its GPUs, if it is in a group."""
        key = LayerKey.of(replica)
        record = self._of(key)
        if record is None:
            return None
        if replica.failures >= MAX_FAILURES:
            self._failed.add(EngineKey(key, replica.cards))
        elif replica.state is ReplicaPhase.READY or is_prepared(replica):
            self._failed.discard(EngineKey(key, replica.cards))
        if replica.state is ReplicaPhase.READY and not record.served:
            record = msgspec.structs.replace(record, served=True)
            self._put(record)
        keys = (LayerKey(key.model, shape, key.generation) for shape in record.plan.engines)
        engines = [self._engine(each) for key in keys for each in self._replicas(key)]
        awake = {shape: record.wanted.get(shape, 0) for shape in record.plan.engines}
        found = gpu_commands(engines, awake, starting=not record.served)
        self._chosen -= found.keys()
        self._chosen |= {engine.id for engine in chosen_engines(engines, awake)}
        return found.get(replica.id)

    def _engine(self, replica: Replica) -> GroupEngine:
        return GroupEngine(
            replica.id,
            replica.shape,
            replica.cards,
            serving=replica.state is ReplicaPhase.READY,
            chosen=replica.id in self._chosen,
            prepared=is_prepared(replica),
            failed=EngineKey(LayerKey.of(replica), replica.cards) in self._failed,
            unhealthy=self._is_unhealthy(replica),
        )

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        inner = dict(await self._inner.layers())
        found: dict[LayerKey, ActuatorLayer] = {}
        for key, record in tuple(self._records.items()):
            held = inner.pop(key, None)
            if not record.wanted:
                await self._end(key, there=held is not None)
            elif held is not None:
                # The host of a group has no heartbeat, and replaces the hosts of its engines itself.
                held = msgspec.structs.replace(held, sleeps=held.wanted > 0, hosts=())
                for shape, wanted in record.wanted.items():
                    found[LayerKey(key.model, shape, key.generation)] = msgspec.structs.replace(
                        held, wanted=wanted, digest=record.digests[shape]
                    )
        return inner | found

    async def nodes(self) -> Sequence[NodeResources]:
        return await self._inner.nodes()

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        record = self._of(key)
        there = record is not None and record.key in await self._inner.layers()
        if record is None or not there:
            if record is not None:
                # The group itself is gone, and the model may have no group now.
                del self._records[record.key]
                self._save()
            plan = gpu_group_of(model)
            if plan is None or key.shape not in plan.engines:
                await self._free(key)
                await self._inner.deploy(key, model, weights, digest, count)
                return
            # The digest of the shape is followed by that of the weights.
            of_weights = digest[len(digest_of(model, key.shape)) :]
            record = GroupRecord(
                key=LayerKey(key.model, plan.shape, key.generation),
                plan=plan,
                wanted=dict.fromkeys(plan.engines, 0),
                digests={shape: digest_of(model, shape) + of_weights for shape in plan.engines},
            )
        elif key.shape in record.wanted:
            return
        if there:
            await self._start(record.key)
            record = self._records[record.key]
        self._put(
            msgspec.structs.replace(
                record,
                wanted=record.wanted | {key.shape: count},
                digests=record.digests | {key.shape: digest},
            )
        )
        if not there:
            await self._free(record.key)
            await self._inner.deploy(record.key, model, weights, record.digests[record.plan.shape], 1)

    async def scale(self, key: LayerKey, count: int) -> None:
        record = self._of(key)
        if record is None:
            if count:
                await self._free(key)
            await self._inner.scale(key, count)
            return
        if key.shape not in record.wanted or record.key not in await self._inner.layers():
            raise ActuatorFailed(f"there is no layer {key} to scale")
        if count:
            await self._start(record.key)
            record = self._records[record.key]
        if not record.wanted[key.shape]:
            # Wanted anew: earlier failures do not count.
            self._failed = {engine for engine in self._failed if engine.layer != key}
        self._put(msgspec.structs.replace(record, wanted=record.wanted | {key.shape: count}))

    async def kill(self, key: LayerKey, replica: str) -> None:
        record = self._of(key)
        await self._inner.kill(key if record is None else record.key, replica)

    async def delete(self, key: LayerKey) -> None:
        record = self._of(key)
        if record is None:
            await self._inner.delete(key)
            return
        left = {shape: wanted for shape, wanted in record.wanted.items() if shape != key.shape}
        self._put(msgspec.structs.replace(record, wanted=left))
        if not left:
            await self._end(record.key, there=True)

    async def stop(self) -> None:
        await self._inner.stop()
        self._records.clear()
        self._save()

    async def close(self) -> None:
        await self._inner.close()

    async def _end(self, key: LayerKey, *, there: bool) -> None:
        """Delete a group without layers; its record last, so that none is forgotten."""
        if there:
            await self._inner.delete(key)
        self._records.pop(key, None)
        self._save()

    async def _start(self, key: LayerKey) -> None:
        """Give a group its GPUs, before an engine of it is wanted: else it would not be tried again."""
        await self._free(key)
        await self._inner.scale(key, 1)

    async def _free(self, key: LayerKey) -> None:
        """Free the GPUs of groups of other revisions that are all asleep, for ``key``."""
        idle = [
            other
            for other, record in self._records.items()
            if other.model == key.model
            and other.generation != key.generation
            and not any(record.wanted.values())
        ]
        inner = await self._inner.layers() if idle else {}
        for other in idle:
            if other in inner and inner[other].wanted:
                await self._inner.scale(other, 0)

    def _of(self, key: LayerKey) -> GroupRecord | None:
        """The group that may contain the layer ``key``."""
        for record in self._records.values():
            same = (record.key.model, record.key.generation) == (key.model, key.generation)
            if same and key.shape in record.plan.engines:
                return record
        return None

    def _put(self, record: GroupRecord) -> None:
        before = self._records
        self._records = before | {record.key: record}
        try:
            self._save()
        except BaseException:
            # It is tried again as long as it does not seem to be done.
            self._records = before
            raise

    def _save(self) -> None:
        self._state.save(self._state.gpu_groups_path, list(self._records.values()))
        self._state.old_gpu_groups_path.unlink(missing_ok=True)

    def _read(self) -> list[GroupRecord]:
        for path in (self._state.gpu_groups_path, self._state.old_gpu_groups_path):
            try:
                found = self._state.load(path, list[GroupRecord])
            except msgspec.DecodeError as error:
                # Written by another version: the groups continue as single replicas of the largest shape.
                log.warning("%s cannot be read: %s", path, error)
                return []
            if found is not None:
                return found
        return []
