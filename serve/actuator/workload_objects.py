"""Kubernetes workloads that are layers: their marks and counts, and writes in the order of leaders' terms.

Each write follows the version that was read: the API server refuses one that comes after another's (409). So
none of a leader whose term is over comes after the first one of the next leader.
Sources: Kubernetes' API, ``autoscaling/v1 Scale``; LeaderWorkerSet's ``leaderworkerset.x-k8s.io/v1``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
import msgspec

from policy.config.external_servers import KubernetesService
from policy.errors import ActuatorFailed, NotLeader
from store.kubernetes.api_server import ObjectMetadata, api_client, own_namespace

LABEL = "tidegate.io/deployment"
ANNOTATION = "tidegate.io/layer"
# Of elected controllers: the id of the deployment and the highest term in which one of them wrote, ID/TERM.
TERM = "tidegate.io/term"
# Attempts at one order: others write too, such as a workload's controller its status.
_ATTEMPTS = 10
_PATHS = {
    "deployment": ("apps/v1", "deployments"),
    "statefulset": ("apps/v1", "statefulsets"),
    "leaderworkerset": ("leaderworkerset.x-k8s.io/v1", "leaderworkersets"),
}
_MERGE = {"content-type": "application/merge-patch+json"}
_MISSING: Mapping[int, bytes] = {httpx.codes.NOT_FOUND: b""}
_CONFLICT: Mapping[int, bytes] = {httpx.codes.CONFLICT: b""}
_GONE: Mapping[int, bytes] = {httpx.codes.NOT_FOUND: b"gone"}


class WorkloadAnnotation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The annotation; ``replicas`` is the desired count where another autoscaler carries it out."""

    model: str
    shape: str
    generation: int
    digest: str
    replicas: int | None = None


class _Spec(msgspec.Struct):
    replicas: int = 1


class WorkloadObject(msgspec.Struct):
    """What is read of a workload."""

    metadata: ObjectMetadata
    spec: _Spec = msgspec.field(default_factory=_Spec)


class _Objects(msgspec.Struct):
    items: list[WorkloadObject] | None = None


class _ScaleStatus(msgspec.Struct):
    selector: str = ""


class _Scale(msgspec.Struct):
    status: _ScaleStatus = msgspec.field(default_factory=_ScaleStatus)


class KubernetesWorkload(NamedTuple):
    """A workload: the service of its model, its kind and its name."""

    service: KubernetesService
    kind: str
    name: str

    @classmethod
    def of(cls, service: KubernetesService, named: str) -> KubernetesWorkload:
        """The workload that a shape names as ``KIND/NAME``."""
        kind, _, name = named.partition("/")
        return cls(service, kind, name)

    @property
    def namespace(self) -> str:
        return self.service.namespace or own_namespace()

    @property
    def collection(self) -> str:
        """The path of all workloads of its kind in its namespace."""
        group, plural = _PATHS[self.kind]
        return f"/apis/{group}/namespaces/{self.namespace}/{plural}"

    @property
    def place(self) -> tuple[str, str]:
        """The API server, and the path of all workloads of its kind in its namespace."""
        return self.service.api, self.collection

    @property
    def path(self) -> str:
        return f"{self.collection}/{self.name}"

    @property
    def pods(self) -> str:
        """The path of all pods in its namespace."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"


class WorkloadClient:
    """Reads and writes workloads as the deployment ``own``, in the ``term`` of an elected controller, or 0.

    Raises :class:`policy.errors.ActuatorFailed` if the API server refuses or does not answer, and
    :class:`policy.errors.NotLeader` once a leader of a higher term wrote.
    """

    def __init__(self, own: str, term: int) -> None:
        self._own = own
        self._term = term

    async def marked(self, place: KubernetesWorkload) -> list[WorkloadObject]:
        """The workloads of this deployment of the kind and in the namespace of ``place``."""
        query = {"labelSelector": f"{LABEL}={self._own}"}
        answer = await self._call(place, "GET", place.collection, instead=_MISSING, params=query)
        found = msgspec.json.decode(answer or b"{}", type=_Objects).items or []
        for each in found:
            self._check_term(each.metadata)
        return found

    async def read(self, workload: KubernetesWorkload) -> WorkloadObject | None:
        """The workload, ``None`` if there is none."""
        answer = await self._call(workload, "GET", workload.path, instead=_MISSING)
        if not answer:
            return None
        found = msgspec.json.decode(answer, type=WorkloadObject)
        self._check_term(found.metadata)
        return found

    async def selector(self, workload: KubernetesWorkload) -> str:
        """The labels of the pods that are replicas; empty until the workload's controller said so."""
        answer = await self._call(workload, "GET", f"{workload.path}/scale")
        return msgspec.json.decode(answer, type=_Scale).status.selector

    async def begin_term(self, workload: KubernetesWorkload) -> None:
        """Let no order of a lower term follow, if there is the workload; nothing else is changed."""
        if self._term and await self.read(workload) is not None:
            await self._write(workload, {}, None)

    async def write(
        self, workload: KubernetesWorkload, mark: WorkloadAnnotation | None, count: int | None
    ) -> None:
        """Give the workload the ``mark``, or none, then the ``count`` of replicas, unless that is ``None``.

        What is cut short is completed by the next call.
        """
        metadata: dict[str, dict[str, str | None]] = {
            "labels": {LABEL: None if mark is None else self._own},
            "annotations": {ANNOTATION: None if mark is None else msgspec.json.encode(mark).decode()},
        }
        await self._write(workload, metadata, count)

    async def delete_pod(
        self, workload: KubernetesWorkload, pod: ObjectMetadata, grace_s: int | None
    ) -> None:
        """Delete a pod, by default with its own grace period; not the next one of this name.

        A deletion names no version of the workload. So the term is written there before, even where it is
        there already, and again if the pod has changed since then.
        """
        path = f"{workload.pods}/{pod.name}"
        for _ in range(_ATTEMPTS):
            if await self.read(workload) is not None:
                await self._write(workload, {}, None, always=True)
            answer = await self._call(workload, "GET", path, instead=_MISSING)
            found = msgspec.json.decode(answer or b'{"metadata":{}}', type=WorkloadObject).metadata
            if found.uid != pod.uid:
                return
            body: dict[str, Any] = {
                "preconditions": {"uid": pod.uid, "resourceVersion": found.resource_version}
            }
            if grace_s is not None:
                body["gracePeriodSeconds"] = grace_s
            if await self._call(workload, "DELETE", path, body, instead={**_GONE, **_CONFLICT}):
                return
        raise ActuatorFailed(f"the pod {pod.name} changed before each of {_ATTEMPTS} attempts to delete it")

    async def _write(
        self,
        workload: KubernetesWorkload,
        metadata: dict[str, dict[str, str | None]],
        count: int | None,
        *,
        always: bool = False,
    ) -> None:
        for _ in range(_ATTEMPTS):
            if await self._written(workload, metadata, count, always=always):
                return
        raise ActuatorFailed(f"{workload}: others wrote before each of {_ATTEMPTS} attempts")

    async def _written(
        self,
        workload: KubernetesWorkload,
        metadata: dict[str, dict[str, str | None]],
        count: int | None,
        *,
        always: bool,
    ) -> bool:
        """Write what differs, or ``always`` the term; ``False`` if somebody else wrote since it was read."""
        seen = await self.read(workload)
        if seen is None:
            raise ActuatorFailed(f"there is no {workload} in the namespace {workload.namespace}")
        owner, version = seen.metadata.labels.get(LABEL, self._own), seen.metadata.resource_version
        if metadata and owner != self._own:
            raise ActuatorFailed(f"{workload} is scaled by another deployment, {owner}")
        if self._term:
            term: dict[str, str | None] = {TERM: f"{self._own}/{self._term}"}
            metadata = metadata | {"annotations": metadata.get("annotations", {}) | term}
        has = {"labels": seen.metadata.labels, "annotations": seen.metadata.annotations}
        differs = any(has[part].get(key) != it for part in metadata for key, it in metadata[part].items())
        if differs or (always and self._term):
            body: dict[str, Any] = {"metadata": {**metadata, "resourceVersion": version}}
            answer = await self._call(workload, "PATCH", workload.path, body, instead=_CONFLICT)
            if not answer:
                return False
            version = msgspec.json.decode(answer, type=WorkloadObject).metadata.resource_version
        if count is None:
            return True
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": count}}
        return bool(await self._call(workload, "PATCH", f"{workload.path}/scale", body, instead=_CONFLICT))

    def _check_term(self, metadata: ObjectMetadata) -> None:
        """A controller that is alone has no term, and follows elected ones."""
        owner, _, term = metadata.annotations.get(TERM, "").partition("/")
        if self._term and owner == self._own and term.isdecimal() and int(term) > self._term:
            raise NotLeader(f"an order of term {self._term} comes after one of term {term}")

    async def _call(
        self,
        workload: KubernetesWorkload,
        method: str,
        path: str,
        body: Any = None,
        *,
        instead: Mapping[int, bytes] = {},
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        """The answer, or what is given ``instead`` of one with another status."""
        headers = _MERGE if method == "PATCH" else {}
        try:
            # A new client each time: the certificates of the API server are renewed.
            async with await asyncio.to_thread(api_client, workload.service.api) as client:
                answer = await client.request(method, path, params=params, headers=headers, json=body)
        except (httpx.HTTPError, OSError) as error:
            raise ActuatorFailed(f"the API server of Kubernetes does not answer: {error!r}") from error
        if answer.status_code in instead:
            return instead[answer.status_code]
        if not answer.is_success:
            text = answer.text[:300]
            raise ActuatorFailed(f"{method} {path}: the API server answered {answer.status_code}: {text}")
        return answer.content
