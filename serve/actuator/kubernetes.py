"""The actuator of external models: Kubernetes workloads, by their subresource ``scale``.

A workload is not Tidegate's: it exists before its layer and after it. A layer is a label with the id of the
deployment and an annotation on the workload, so that a controller without stored state finds it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import httpx
import msgspec

from policy.config.deployment import ModelSpec, Shape
from policy.config.engine_revision import digest, used_shapes
from policy.config.external_servers import KubernetesService
from policy.errors import ActuatorFailed
from policy.scaling.reconcile_steps import LayerKey
from policy.types import ReplicaPhase
from policy.wire.heartbeat import Heartbeat, HeartbeatResponse
from serve.actuator.interface import ASK, ActuatorLayer, LayerCache, NodeResources, deployment_id
from serve.actuator.pod_replicas import METRICS_TIMEOUT_S, LayerPods
from serve.actuator.workload_objects import (
    ANNOTATION,
    LABEL,
    KubernetesWorkload,
    WorkloadAnnotation,
    WorkloadClient,
)
from serve.host.weight_verification import ResolvedWeights
from store.kubernetes.api_server import ObjectMetadata
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

REPORT_S = 0.5
# For how long a place that only earlier revisions used may fail before it is given up: it may be gone for
# good, and all other workloads wait for it.
GIVE_UP_S = 60.0


class _Found(NamedTuple):
    """A layer's workload, what its annotation says (``None`` before it has one), and its replicas."""

    workload: KubernetesWorkload
    mark: WorkloadAnnotation | None
    digest: str
    wanted: int


class KubernetesActuator:
    """The actuator port over workloads that exist.

    ``models`` are those of the deployment at the start: a workload of theirs that runs without a layer is one
    of the first generation, so that its pods are taken over as they are. ``term`` is that of an elected
    controller: it is written to all workloads before anything is read of them.
    """

    name = "kubernetes"

    def __init__(self, state: StateDir, models: Iterable[ModelSpec] = (), term: int = 0) -> None:
        self._api = WorkloadClient(deployment_id(state), term)
        self._term_begun = False
        self._models: dict[str, ModelSpec] = {}
        # By model, API server and namespace.
        self._services: dict[tuple[str, str, str], KubernetesService] = {}
        # A workload of each kind in each place, by the API server and the path of all of them.
        self._known: dict[tuple[str, str], KubernetesWorkload] = {}
        # Those of revisions before, and since when they fail.
        self._earlier: dict[tuple[str, str], KubernetesWorkload] = {}
        self._failing_since: dict[tuple[str, str], float] = {}
        self._last = LayerCache(self._ask)
        self.declare(models)
        self._found: dict[LayerKey, _Found] = {}
        self._pods: dict[LayerKey, LayerPods] = {}
        self._ordered: set[str] = set()
        # Failed questions in a row, the last error, and when the next one is due.
        self._failures, self._failed, self._retry_at = 0, "", 0.0
        self._warned: set[str] = set()

    def declare(self, models: Iterable[ModelSpec], earlier: Iterable[ModelSpec] = ()) -> None:
        """The models of the deployment, and the configurations of ``earlier`` revisions that may still run.

        After the first answer workloads are found by their annotations.
        """
        if self._last.value is not None:
            used = {at for spec in models if spec.is_scaled for at in self._places(spec, used_shapes(spec))}
            self._earlier |= {at: self._known.pop(at) for at in self._known.keys() - used}
            return
        self._models = {spec.name: spec for spec in models if _service(spec) is not None and spec.is_scaled}
        self._services, self._known, self._earlier = {}, {}, {}
        for spec in earlier:
            # Also the shapes that no mode uses any more.
            self._earlier |= self._places(spec, spec.shapes)
        for spec in self._models.values():
            self._note(spec)
        self._retry_at = 0.0

    async def layers(self) -> Mapping[LayerKey, ActuatorLayer]:
        """The layers as of the last answer: they stay while the API server does not answer.

        Raises :class:`policy.errors.ActuatorFailed` before the first one.
        """
        clock = asyncio.get_running_loop().time
        held = self._last.value
        if clock() >= self._retry_at:
            try:
                held = await self._last.get()
                self._failures = 0
            except ActuatorFailed as error:
                self._failures, self._failed = self._failures + 1, str(error)
                # From now on: one that does not answer took seconds, in which nothing else was scaled.
                self._retry_at = clock() + ASK.delay_s(self._failures)
                if self._failures == 1 and held is not None:
                    log.warning("%s", error)
        if held is None:
            raise ActuatorFailed(self._failed)
        return {key: self._with_waits(key, each) for key, each in held.items()}

    async def nodes(self) -> Sequence[NodeResources]:
        return ()

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: ResolvedWeights | None, digest: str, count: int
    ) -> None:
        self._note(model)
        if key in await self._last.ask():
            return
        service = _service(model)
        assert service is not None  # the parser asks for it
        workload = KubernetesWorkload.of(service, model.shapes[key.shape].workload)
        await self._write(workload, _mark(key, digest), count)

    async def scale(self, key: LayerKey, count: int) -> None:
        found = self._found.get(key) or (await self._asked()).get(key)
        if found is None:
            raise ActuatorFailed(f"there is no layer {key} to scale")
        await self._write(found.workload, found.mark or _mark(key, found.digest), count)

    async def kill(self, key: LayerKey, replica: str) -> None:
        await self._delete_pod(key, replica, grace_s=0)

    async def delete(self, key: LayerKey) -> None:
        if (found := (await self._asked()).get(key)) is None:
            return
        await self.scale(key, 0)
        await self._api.write(found.workload, None, None)
        self._last.changed()

    async def stop(self) -> None:
        for key in await self._asked():
            await self.delete(key)

    async def close(self) -> None:
        for pods in self._pods.values():
            await pods.close()
        self._pods.clear()

    async def report(
        self, take: Callable[[Heartbeat], HeartbeatResponse | None], *, every_s: float = REPORT_S
    ) -> None:
        """Send heartbeats of all pods to ``take``, until cancelled; a pod that must leave is deleted."""
        # Pods get none of Tidegate's secrets.
        async with httpx.AsyncClient(timeout=METRICS_TIMEOUT_S, trust_env=False) as client:
            while True:
                try:
                    for key, pods in tuple(self._pods.items()):
                        for replica in pods.replicas(client):
                            orders = take(Heartbeat(replica=replica))
                            if orders is not None and orders.leave and replica.state is ReplicaPhase.READY:
                                await self._leave(key, replica.id)
                        if key not in self._found and pods.ended:
                            await self._pods.pop(key).close()
                except ActuatorFailed as error:
                    log.warning("%s", error)
                await asyncio.sleep(every_s)

    def _note(self, spec: ModelSpec) -> None:
        """Look at the places of a model's workloads from now on."""
        self._known |= self._places(spec, used_shapes(spec))

    def _places(
        self, spec: ModelSpec, shapes: Mapping[str, Shape]
    ) -> dict[tuple[str, str], KubernetesWorkload]:
        """A workload in each place that ``shapes`` of a model name."""
        if (service := _service(spec)) is None:
            return {}
        workloads = [
            KubernetesWorkload.of(service, each.workload) for each in shapes.values() if each.workload
        ]
        for workload in workloads:
            self._services[spec.name, service.api, workload.namespace] = service
        return {each.place: each for each in workloads}

    async def _asked(self) -> dict[LayerKey, _Found]:
        await self._last.ask()
        return self._found

    async def _ask(self) -> Mapping[LayerKey, ActuatorLayer]:
        found = await self._find()
        if not self._term_begun:
            # What an order of the leader before has changed is found after this.
            used = {each.workload.path: each.workload for each in found.values()}
            for workload in (used | {each.path: each for each in self._declared()}).values():
                await self._api.begin_term(workload)
            self._term_begun = True
            found = await self._find()
        for key in found.keys() - self._pods.keys():
            if (pods := await self._follow(key, found[key].workload)) is not None:
                self._pods[key] = pods
        self._found = found
        return {key: ActuatorLayer(wanted=each.wanted, digest=each.digest) for key, each in found.items()}

    async def _find(self) -> dict[LayerKey, _Found]:
        found: dict[LayerKey, _Found] = {}
        for at, place in tuple(self._earlier.items()):
            if at not in self._known:
                found |= await self._found_in_earlier(place)
        for place in self._known.values():
            found |= await self._found_in(place)
        for key, workload, made_of in self._unmarked(found):
            running = await self._api.read(workload)
            if running is not None and running.spec.replicas and LABEL not in running.metadata.labels:
                found[key] = _Found(workload, None, made_of, running.spec.replicas)
        return found

    async def _found_in(self, place: KubernetesWorkload) -> dict[LayerKey, _Found]:
        """The layers whose workloads are of the kind and in the place of ``place``."""
        found: dict[LayerKey, _Found] = {}
        for each in await self._api.marked(place):
            workload = place._replace(name=each.metadata.name)
            if (mark := self._mark_of(workload, each.metadata)) is not None:
                key = LayerKey(mark.model, mark.shape, mark.generation)
                wanted = each.spec.replicas if mark.replicas is None else mark.replicas
                of = key.model, place.service.api, place.namespace
                workload = workload._replace(service=self._services.get(of, place.service))
                found[key] = _Found(workload, mark, mark.digest, wanted)
        return found

    async def _found_in_earlier(self, place: KubernetesWorkload) -> dict[LayerKey, _Found]:
        """The same of a place that only earlier revisions used: none once it is given up."""
        now = asyncio.get_running_loop().time()
        try:
            found = await self._found_in(place)
        except ActuatorFailed as error:
            since = self._failing_since.setdefault(place.place, now)
            used = any(each.workload.place == place.place for each in self._found.values())
            if used or now - since < GIVE_UP_S:
                raise
            log.warning(
                "pods of earlier revisions in %s are no longer looked for: %s", place.collection, error
            )
            del self._earlier[place.place]
            return {}
        self._failing_since.pop(place.place, None)
        return found

    def _mark_of(self, workload: KubernetesWorkload, metadata: ObjectMetadata) -> WorkloadAnnotation | None:
        """What the annotation of a labelled workload says; ``None`` if somebody broke it."""
        try:
            return msgspec.json.decode(metadata.annotations.get(ANNOTATION, ""), type=WorkloadAnnotation)
        except msgspec.MsgspecError as error:
            self._warn(
                f"{workload} has the label {LABEL}, but its annotation {ANNOTATION} is broken: {error}"
            )
            return None

    def _warn(self, message: str) -> None:
        """Once: it is looked at again and again."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning("%s", message)

    def _declared(self) -> Iterator[KubernetesWorkload]:
        for spec in self._models.values():
            if (service := _service(spec)) is not None:
                for shape in used_shapes(spec).values():
                    yield KubernetesWorkload.of(service, shape.workload)

    def _unmarked(
        self, found: Mapping[LayerKey, _Found]
    ) -> Iterator[tuple[LayerKey, KubernetesWorkload, str]]:
        """The workloads of the first models of which no layer was found, and the layers they would be."""
        known = {key.model for key in found}
        for spec in self._models.values():
            service = _service(spec)
            if spec.name not in known and service is not None:
                for name, shape in used_shapes(spec).items():
                    yield (
                        LayerKey(spec.name, name, 1),
                        KubernetesWorkload.of(service, shape.workload),
                        digest(spec, name),
                    )

    async def _follow(self, key: LayerKey, workload: KubernetesWorkload) -> LayerPods | None:
        """The pods of a layer; ``None`` while the workload's controller has not said which they are."""
        selector = await self._api.selector(workload)
        if not selector:
            self._warn(f"{workload}: its scale has no selector of pods; does the controller of its kind run?")
            return None
        return LayerPods(
            key,
            workload.service,
            workload.pods,
            selector,
            changed=self._last.changed,
            failed=lambda error: log.warning("the pods of %s cannot be followed: %r", key, error),
        )

    def _with_waits(self, key: LayerKey, held: ActuatorLayer) -> ActuatorLayer:
        pods = self._pods[key].pods if key in self._pods else []
        waits = [pod.unplaced for pod in pods if pod.unplaced]
        return msgspec.structs.replace(held, waits=waits[0] if waits else "", unplaced=len(waits))

    async def _write(self, workload: KubernetesWorkload, mark: WorkloadAnnotation, count: int) -> None:
        # Once one workload of a model is marked, others without a mark are not found any more.
        for key, other in self._found.items():
            if key.model == mark.model and other.mark is None and other.workload.path != workload.path:
                await self._order(other.workload, _mark(key, other.digest), other.wanted)
        await self._order(workload, mark, count)
        self._last.changed()
        await self._last.ask()

    async def _order(self, workload: KubernetesWorkload, mark: WorkloadAnnotation, count: int) -> None:
        autoscaled = workload.service.scaled_by == "autoscaler"
        mark = msgspec.structs.replace(mark, replicas=count if autoscaled else None)
        await self._api.write(workload, mark, None if autoscaled else count)

    async def _leave(self, key: LayerKey, replica: str) -> None:
        if replica not in self._ordered:
            await self._delete_pod(key, replica)
            self._ordered.add(replica)

    async def _delete_pod(self, key: LayerKey, replica: str, grace_s: int | None = None) -> None:
        found, pods = self._found.get(key), self._pods.get(key)
        if found is not None and pods is not None and (pod := pods.pod(replica)) is not None:
            await self._api.delete_pod(found.workload, pod.metadata, grace_s)


def _mark(key: LayerKey, digest: str) -> WorkloadAnnotation:
    return WorkloadAnnotation(model=key.model, shape=key.shape, generation=key.generation, digest=digest)


def _service(spec: ModelSpec) -> KubernetesService | None:
    return spec.discovery.kubernetes if spec.discovery is not None else None
