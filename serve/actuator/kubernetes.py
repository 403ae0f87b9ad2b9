"""The actuator of external models: Kubernetes workloads, by their subresource ``scale``.

A workload is not Tidegate's: it exists before its layer and after it. A layer is a label with the id of the
deployment and an annotation on the workload, so that a controller without stored state finds it again.
Sources: Kubernetes' API, ``autoscaling/v1 Scale``; LeaderWorkerSet's ``leaderworkerset.x-k8s.io/v1``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from policy.config.deployment import ModelSpec
from policy.config.engine_revision import digest, used_shapes
from policy.config.external_servers import KubernetesService
from policy.errors import ActuatorFailed
from policy.scaling.transition_steps import LayerKey
from policy.types import ReplicaPhase
from policy.wire.heartbeat import Heartbeat, Orders
from serve.actuator.interface import Held, LastAnswer, Node, deployment_id
from serve.actuator.pods import METRICS_TIMEOUT_S, LayerPods
from serve.host.weight_verification import Weights
from store.kubernetes.api_server import Metadata, api_client, own_namespace
from store.state_dir import StateDir

log = logging.getLogger("tidegate.controller")

LABEL = "tidegate.io/deployment"
ANNOTATION = "tidegate.io/layer"
REPORT_S = 0.5
_PATHS = {
    "deployment": ("apps/v1", "deployments"),
    "statefulset": ("apps/v1", "statefulsets"),
    "leaderworkerset": ("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
}
_MERGE = {"content-type": "application/merge-patch+json"}


class _Layer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The annotation; ``replicas`` is the desired count where another autoscaler carries it out."""

    model: str
    shape: str
    generation: int
    digest: str
    replicas: int | None = None


class _Spec(msgspec.Struct):
    replicas: int = 1


class _Object(msgspec.Struct):
    """What is read of a workload."""

    metadata: Metadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


class _Objects(msgspec.Struct):
    items: list[_Object] = []


class _ScaleStatus(msgspec.Struct):
    selector: str = ""


class _Scale(msgspec.Struct):
    status: _ScaleStatus = msgspec.field(default_factory=_ScaleStatus)


class _Workload(NamedTuple):
    """A workload: the service of its model, its kind and its name."""

    service: KubernetesService
    kind: str
    name: str

    @property
    def namespace(self) -> str:
        return self.service.namespace or own_namespace()

    @property
    def collection(self) -> str:
        """The path of all workloads of its kind in its namespace."""
        group, plural = _PATHS[self.kind]
        return f"/apis/{group}/namespaces/{self.namespace}/{plural}"

    @property
    def path(self) -> str:
        return f"{self.collection}/{self.name}"


class _Found(NamedTuple):
    """A layer's workload, what its annotation says (``None`` before it has one), and its replicas."""

    workload: _Workload
    layer: _Layer | None
    digest: str
    wanted: int


class KubernetesActuator:
    """The actuator port over workloads that exist.

    ``models`` are those of the deployment at the start: a workload of theirs that runs without a layer is one
    of the first generation, so that its pods are taken over as they are.
    """

    name = "kubernetes"

    def __init__(self, state: StateDir, models: Iterable[ModelSpec] = ()) -> None:
        self._id = deployment_id(state)
        self._models = {spec.name: spec for spec in models if _service(spec) is not None and spec.modes}
        self._services: dict[str, KubernetesService] = {}
        # A workload of each kind in each place, by the API server and the path of all of them.
        self._known: dict[tuple[str, str], _Workload] = {}
        for spec in self._models.values():
            self._note(spec)
        self._found: dict[LayerKey, _Found] = {}
        self._pods: dict[LayerKey, LayerPods] = {}
        self._ordered: set[str] = set()
        self._last = LastAnswer(self._ask)
        self._failing = False

    async def layers(self) -> Mapping[LayerKey, Held]:
        """The layers as of the last answer: they stay while the API server does not answer.

        Raises :class:`policy.errors.ActuatorFailed` before the first one.
        """
        try:
            held = await self._last.get()
            self._failing = False
        except ActuatorFailed as error:
            if self._last.value is None:
                raise
            if not self._failing:
                log.warning("%s", error)
            self._failing, held = True, self._last.value
        return {key: self._with_waits(key, each) for key, each in held.items()}

    async def nodes(self) -> Sequence[Node]:
        return ()

    async def deploy(
        self, key: LayerKey, model: ModelSpec, weights: Weights | None, digest: str, count: int
    ) -> None:
        self._note(model)
        if key in await self._last.ask():
            return
        service = _service(model)
        assert service is not None  # the parser asks for it
        workload = _workload(service, model.shapes[key.shape].workload)
        answer = await self._call(workload, "GET", workload.path)
        owner = msgspec.json.decode(answer, type=_Object).metadata.labels.get(LABEL, self._id)
        if owner != self._id:
            raise ActuatorFailed(f"{workload.kind}/{workload.name} is scaled by another deployment, {owner}")
        layer = _Layer(model=key.model, shape=key.shape, generation=key.generation, digest=digest)
        await self._write(workload, layer, count)

    async def scale(self, key: LayerKey, count: int) -> None:
        found = self._found.get(key) or (await self._asked()).get(key)
        if found is None:
            raise ActuatorFailed(f"there is no layer {key} to scale")
        layer = found.layer or _Layer(
            model=key.model, shape=key.shape, generation=key.generation, digest=found.digest
        )
        await self._write(found.workload, layer, count)

    async def kill(self, key: LayerKey, replica: str) -> None:
        await self._delete_pod(key, replica, grace_s=0)

    async def delete(self, key: LayerKey) -> None:
        if (found := (await self._asked()).get(key)) is None:
            return
        await self.scale(key, 0)
        await self._mark(found.workload, None, None)

    async def stop(self) -> None:
        for key in await self._asked():
            await self.delete(key)

    async def close(self) -> None:
        for pods in self._pods.values():
            await pods.close()
        self._pods.clear()

    async def report(self, take: Callable[[Heartbeat], Orders | None]) -> None:
        """Send heartbeats of all pods to ``take``, until cancelled; a pod that must leave is deleted."""
        clock = asyncio.get_running_loop().time
        # Pods get none of Tidegate's secrets.
        async with httpx.AsyncClient(timeout=METRICS_TIMEOUT_S, trust_env=False) as client:
            while True:
                try:
                    for key, pods in tuple(self._pods.items()):
                        for replica in await pods.replicas(client, clock()):
                            orders = take(Heartbeat(replica=replica))
                            if orders is not None and orders.leave and replica.state is ReplicaPhase.READY:
                                await self._leave(key, replica.id)
                        if key not in self._found and pods.ended:
                            await self._pods.pop(key).close()
                except ActuatorFailed as error:
                    log.warning("%s", error)
                await asyncio.sleep(REPORT_S)

    def _note(self, spec: ModelSpec) -> None:
        """Look at the places of a model's workloads from now on."""
        if (service := _service(spec)) is not None:
            self._services[spec.name] = service
            for shape in used_shapes(spec).values():
                workload = _workload(service, shape.workload)
                self._known[service.api, workload.collection] = workload

    async def _asked(self) -> dict[LayerKey, _Found]:
        await self._last.ask()
        return self._found

    async def _ask(self) -> Mapping[LayerKey, Held]:
        found: dict[LayerKey, _Found] = {}
        for place in self._known.values():
            query = {"labelSelector": f"{LABEL}={self._id}"}
            answer = await self._call(place, "GET", place.collection, missing=b"{}", params=query)
            for each in msgspec.json.decode(answer, type=_Objects).items:
                layer = msgspec.json.decode(each.metadata.annotations[ANNOTATION], type=_Layer)
                key = LayerKey(layer.model, layer.shape, layer.generation)
                wanted = each.spec.replicas if layer.replicas is None else layer.replicas
                service = self._services.get(key.model, place.service)
                workload = _Workload(service, place.kind, each.metadata.name)
                found[key] = _Found(workload, layer, layer.digest, wanted)
        for key, workload, made_of in self._unmarked(found):
            answer = await self._call(workload, "GET", workload.path, missing=b"")
            running = msgspec.json.decode(answer or b'{"metadata": {}}', type=_Object)
            if answer and running.spec.replicas and LABEL not in running.metadata.labels:
                found[key] = _Found(workload, None, made_of, running.spec.replicas)
        for key in found.keys() - self._pods.keys():
            self._pods[key] = await self._follow(key, found[key].workload)
        self._found = found
        return {key: Held(wanted=each.wanted, digest=each.digest) for key, each in found.items()}

    def _unmarked(self, found: Mapping[LayerKey, _Found]) -> Iterator[tuple[LayerKey, _Workload, str]]:
        """The workloads of the first models of which no layer was found, and the layers they would be."""
        known = {key.model for key in found}
        for spec in self._models.values():
            service = _service(spec)
            if spec.name not in known and service is not None:
                for name, shape in used_shapes(spec).items():
                    yield LayerKey(spec.name, name, 1), _workload(service, shape.workload), digest(spec, name)

    async def _follow(self, key: LayerKey, workload: _Workload) -> LayerPods:
        answer = await self._call(workload, "GET", f"{workload.path}/scale")
        selector = msgspec.json.decode(answer, type=_Scale).status.selector
        if not selector:
            raise ActuatorFailed(f"{workload.kind}/{workload.name}: its scale has no selector of pods yet")
        return LayerPods(
            key,
            workload.service,
            f"/api/v1/namespaces/{workload.namespace}/pods",
            selector,
            changed=self._last.changed,
            failed=lambda error: log.warning("the pods of %s cannot be followed: %r", key, error),
        )

    def _with_waits(self, key: LayerKey, held: Held) -> Held:
        pods = self._pods[key].pods if key in self._pods else []
        waits = [pod.unplaced for pod in pods if pod.unplaced]
        return msgspec.structs.replace(held, waits=waits[0] if waits else "", unplaced=len(waits))

    async def _write(self, workload: _Workload, layer: _Layer, count: int) -> None:
        """Mark the workload as the layer, then scale it; what is cut short is completed by the next call."""
        if workload.service.scaled_by == "autoscaler":
            layer = msgspec.structs.replace(layer, replicas=count)
        await self._mark(workload, self._id, msgspec.json.encode(layer).decode())
        if layer.replicas is None:
            body = {"spec": {"replicas": count}}
            await self._call(workload, "PATCH", f"{workload.path}/scale", body)
        await self._last.ask()

    async def _mark(self, workload: _Workload, owner: str | None, layer: str | None) -> None:
        metadata = {"labels": {LABEL: owner}, "annotations": {ANNOTATION: layer}}
        await self._call(workload, "PATCH", workload.path, {"metadata": metadata})
        self._last.changed()

    async def _leave(self, key: LayerKey, pod: str) -> None:
        if pod not in self._ordered:
            self._ordered.add(pod)
            await self._delete_pod(key, pod)

    async def _delete_pod(self, key: LayerKey, pod: str, grace_s: int | None = None) -> None:
        found, pods = self._found.get(key), self._pods.get(key)
        if found is not None and pods is not None:
            body = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
            await self._call(found.workload, "DELETE", f"{pods.path}/{pod}", body, missing=b"")

    async def _call(
        self,
        workload: _Workload,
        method: str,
        path: str,
        body: Any = None,
        *,
        missing: bytes | None = None,
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        """The answer, or ``missing`` for what does not exist, if that is given."""
        headers = _MERGE if method == "PATCH" else {}
        try:
            # A new client each time: the pod's token is renewed.
            async with await asyncio.to_thread(api_client, workload.service.api) as client:
                answer = await client.request(method, path, params=params, headers=headers, json=body)
        except (httpx.HTTPError, OSError) as error:
            raise ActuatorFailed(f"the API server of Kubernetes does not answer: {error!r}") from error
        if answer.status_code == httpx.codes.NOT_FOUND and missing is not None:
            return missing
        if answer.status_code != httpx.codes.OK:
            text = answer.text[:300]
            raise ActuatorFailed(f"{method} {path}: the API server answered {answer.status_code}: {text}")
        return answer.content


def _service(spec: ModelSpec) -> KubernetesService | None:
    return spec.discovery.kubernetes if spec.discovery is not None else None


def _workload(service: KubernetesService, name: str) -> _Workload:
    kind, _, named = name.partition("/")
    return _Workload(service, kind, named)
