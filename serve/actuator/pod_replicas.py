"""The pods of a layer as replicas: their phases from Kubernetes, their load from vLLM's metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from datetime import datetime

import httpx
import msgspec

from policy.config.external_servers import KubernetesService
from policy.scaling.reconcile_steps import LayerKey
from policy.types import Replica, ReplicaLoad, ReplicaPhase
from policy.wire.vllm_metrics import VllmMetrics
from store.kubernetes.api_server import ObjectMetadata, ObjectWatch
from store.kubernetes.engine_pod_labels import adapters_of, replica_id

METRICS_TIMEOUT_S = 2.0
# How often a pod's metrics are read, and those of a server without vLLM's.
_READ_S, _READ_AGAIN_S = 1.0, 10.0
_MAX_METRICS = 4 * 1024 * 1024
_RUNNING, _WAITING, _KV_USED = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
_TOKENS = ("prompt_tokens_total", "generation_tokens_total")
_METRICS = VllmMetrics(_RUNNING, _WAITING, _KV_USED, *_TOKENS)


class _Port(msgspec.Struct, rename="camel"):
    container_port: int
    name: str = ""


class _Container(msgspec.Struct):
    ports: list[_Port] = []


class _PodSpec(msgspec.Struct, rename="camel"):
    node_name: str = ""
    containers: list[_Container] = []


class _Condition(msgspec.Struct, rename="camel"):
    type: str
    status: str
    reason: str | None = None
    message: str | None = None
    last_transition_time: str | None = None


class _Waiting(msgspec.Struct):
    reason: str = ""
    message: str = ""


class _State(msgspec.Struct):
    waiting: _Waiting | None = None


class _ContainerStatus(msgspec.Struct, rename="camel"):
    restart_count: int = 0
    state: _State = msgspec.field(default_factory=_State)


class _PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[_Condition] = []
    container_statuses: list[_ContainerStatus] = []


class Pod(msgspec.Struct):
    """What is read of a pod (core v1)."""

    metadata: ObjectMetadata
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)

    @property
    def id(self) -> str:
        """Its replica: pods of a StatefulSet and of a LeaderWorkerSet have the name of one before them."""
        return replica_id(self.metadata.name, self.metadata.uid)

    @property
    def ended(self) -> bool:
        """Whether its containers ended for good, as those of an evicted pod, which stays for a while."""
        return self.status.phase in ("Failed", "Succeeded")

    @property
    def restarts(self) -> int:
        """How often its containers were started again, in all its life."""
        return sum(each.restart_count for each in self.status.container_statuses)

    def condition(self, name: str) -> _Condition | None:
        """The condition of this type, if there is one."""
        return next((each for each in self.status.conditions if each.type == name), None)

    @property
    def unplaced(self) -> str:
        """Why no node has room for it; empty if one has, or if that is not known yet."""
        found = self.condition("PodScheduled")
        return (found.message or "no node") if found is not None and found.reason == "Unschedulable" else ""


class LayerPods:
    """The pods of one layer. ``changed`` is called at each change, ``failed`` when the API server fails."""

    def __init__(
        self,
        key: LayerKey,
        service: KubernetesService,
        path: str,
        selector: str,
        *,
        changed: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.key = key
        self.path = path
        self._port = service.port
        query = {"labelSelector": selector}
        self._watch = ObjectWatch(service.api, path, query, Pod, on_change=changed, failed=failed)
        self._watch.start()
        self._loads: dict[str, ReplicaLoad] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._reported: dict[str, Replica] = {}
        # The restarts of each pod when it was last ready.
        self._proven: dict[str, int] = {}

    @property
    def pods(self) -> list[Pod]:
        """Those that are there; none until they were listed."""
        return [pod for pod in (self._watch.objects or {}).values() if not pod.ended]

    @property
    def ended(self) -> bool:
        """Whether there is none, and that was reported."""
        return self._watch.objects is not None and not self.pods and not self._reported

    def pod(self, replica: str) -> Pod | None:
        """The pod that is this replica."""
        return next((pod for pod in self.pods if pod.id == replica), None)

    def replicas(self, client: httpx.AsyncClient) -> list[Replica]:
        """The pods as replicas, and once those that ended since the last call as stopped ones.

        Their metrics are read with ``client`` from now on.
        """
        pods = {pod.id: pod for pod in self.pods}
        ready = {name for name, pod in pods.items() if _phase(pod) is ReplicaPhase.READY}
        for name in self._reading.keys() - ready:
            self._reading.pop(name).cancel()
            self._loads.pop(name, None)
        # None waits for another one that does not answer: heartbeats must go on.
        for name in ready - self._reading.keys():
            self._reading[name] = asyncio.create_task(self._read_load(client, pods[name]))
        self._proven = {name: count for name, count in self._proven.items() if name in pods}
        self._proven |= {name: pods[name].restarts for name in ready}
        found = {name: self._replica(pod) for name, pod in pods.items()}
        ended = [
            msgspec.structs.replace(each, state=ReplicaPhase.STOPPED)
            for name, each in self._reported.items()
            if name not in found
        ]
        self._reported = found
        return [*ended, *found.values()]

    async def close(self) -> None:
        """Follow them no longer."""
        for task in self._reading.values():
            task.cancel()
        await asyncio.gather(*self._reading.values(), return_exceptions=True)
        self._reading.clear()
        await self._watch.close()

    def _replica(self, pod: Pod) -> Replica:
        phase = _phase(pod)
        statuses = pod.status.container_statuses
        reasons = [each.state.waiting for each in statuses if each.state.waiting is not None]
        waiting = next((each.message or each.reason for each in reasons), "")
        starting = phase is ReplicaPhase.STARTING
        return Replica(
            id=pod.id,
            model=self.key.model,
            shape=self.key.shape,
            generation=self.key.generation,
            state=phase,
            load=self._loads.get(pod.id) or ReplicaLoad(at=time.time()),
            node=pod.spec.node_name,
            adapters=adapters_of(pod.metadata),
            incarnation=pod.restarts,
            start_s=_start_s(pod) if phase is ReplicaPhase.READY else None,
            # A pod that was ready and is not for a moment has not failed to start, however old its restarts.
            failures=max(0, pod.restarts - self._proven.get(pod.id, 0)) if starting else 0,
            reason=(waiting or pod.unplaced) if starting else "",
        )

    async def _read_load(self, client: httpx.AsyncClient, pod: Pod) -> None:
        """Read what its server reports, until cancelled; nothing of a server without vLLM's metrics."""
        port = next(self._ports(pod), None)
        host = f"[{pod.status.pod_ip}]" if ":" in pod.status.pod_ip else pod.status.pod_ip
        while port is not None and host:
            found = await _read(client, f"http://{host}:{port}/metrics")
            running, waiting = int(found.get(_RUNNING, 0)), int(found.get(_WAITING, 0))
            self._loads[pod.id] = ReplicaLoad(
                in_flight=running + waiting,
                running=running,
                waiting=waiting,
                kv_used=min(1.0, found.get(_KV_USED, 0.0)),
                tokens=int(sum(found.get(name, 0.0) for name in _TOKENS)),
                at=time.time(),
            )
            await asyncio.sleep(_READ_S if found else _READ_AGAIN_S)

    def _ports(self, pod: Pod) -> Iterator[int]:
        if isinstance(self._port, int):
            yield self._port
        for container in pod.spec.containers:
            for port in container.ports:
                if self._port in (None, port.name):
                    yield port.container_port


async def _read(client: httpx.AsyncClient, url: str) -> dict[str, float]:
    """vLLM's metrics; none of a server that does not answer, or answers with too much."""
    body = b""
    try:
        async with client.stream("GET", url) as answer:
            async for part in answer.aiter_bytes():
                body += part
                if answer.status_code != httpx.codes.OK or len(body) > _MAX_METRICS:
                    return {}
    except httpx.HTTPError:
        return {}
    return _METRICS.read(body)


def _phase(pod: Pod) -> ReplicaPhase:
    if pod.metadata.deletion_timestamp is not None:
        return ReplicaPhase.DRAINING
    ready = pod.condition("Ready")
    return ReplicaPhase.READY if ready is not None and ready.status == "True" else ReplicaPhase.STARTING


def _start_s(pod: Pod) -> float | None:
    """From its creation until it was ready, if both are known."""
    ready, created = pod.condition("Ready"), pod.metadata.creation_timestamp
    if ready is None or ready.last_transition_time is None or created is None:
        return None
    began, ended = (datetime.fromisoformat(each) for each in (created, ready.last_transition_time))
    return max(0.0, (ended - began).total_seconds())
