"""A double of the API server of Kubernetes: list, watch, scale, and workloads that make pods."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SLICES = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
PODS = "/api/v1/namespaces/models/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/models/deployments"
STATEFUL_SETS = "/apis/apps/v1/namespaces/models/statefulsets"
LEADER_WORKER_SETS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/models/leaderworkersets"
SERVICES = "/api/v1/namespaces/models/services"
COLLECTIONS = (SLICES, SERVICES, PODS, DEPLOYMENTS, STATEFUL_SETS, LEADER_WORKER_SETS)
# Their pods are numbered: one that is deleted comes back with its name, and the last one ends first.
NUMBERED = (STATEFUL_SETS, LEADER_WORKER_SETS)
# The pods of each group of a LeaderWorkerSet; its controller lets `scale` select the leaders.
GROUP = 2
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


class KubernetesApi:
    """Objects by the path of their collection and by name. ``paths`` are the paths and queries of requests.

    Endpoints are ``HOST:PORT`` of the service `vllm`, one slice each. Pods of a workload are ready at once,
    unless it is ``slow``, and end ``drain_s`` after they were deleted, the newest first. If it is set,
    ``endpoint`` is one of the service while any pod is ready. A write that does not follow the version that
    it names is refused. ``refuses`` gives the status of a request (method, path and query) that is, or 0.
    ``selects``: `scale` says which pods are replicas. A request that is no watch waits for
    ``before`` and its answer for ``after``: they are called with its method, path and query.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.forgotten = 0
        self.slow = False
        self.endpoint = ""
        self.drain_s = 0.2
        self.pod_port = 8000
        self.refuses: Callable[[str], int] = lambda asked: 0
        self.selects = True
        self.before: Callable[[str], Awaitable[None]] = _at_once
        self.after: Callable[[str], Awaitable[None]] = _at_once
        self._version = 1
        self._objects: dict[str, dict[str, dict[str, Any]]] = {}
        self._history: list[tuple[str, dict[str, Any]]] = []
        self._numbers = itertools.count(1)
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        # Those that wait for a change find that nobody reads.
        self._changed.set()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def put(
        self, endpoint: str, *, ready: bool | None = True, port_name: str = "http", pod: str = "", **more: Any
    ) -> None:
        """Add an endpoint, or change whether it is ready; ``more`` are fields of its slice."""
        host, _, port = endpoint.rpartition(":")
        found: dict[str, Any] = {
            "addresses": [host],
            "conditions": {"ready": ready, "terminating": ready is False},
        }
        if pod:
            found["targetRef"] = {"kind": "Pod", "name": pod, "uid": f"uid of {pod}"}
        self.change(SLICES, endpoint, {
            "metadata": {"labels": {"kubernetes.io/service-name": "vllm", **more.pop("labels", {})}},
            "endpoints": [found],
            "ports": [{"port": 9, "name": "metrics"}, {"port": int(port), "name": port_name}],
        } | more)  # fmt: skip

    def put_service(self, selector: dict[str, str]) -> None:
        """Add the service `vllm`, or change which pods it selects."""
        self.change(SERVICES, "vllm", {"metadata": {}, "spec": {"selector": selector}})

    def put_pod(
        self, name: str, labels: dict[str, str] | None = None, annotations: dict[str, str] | None = None
    ) -> None:
        """Add a pod of the service `vllm`, or change its labels and annotations."""
        metadata = {"uid": f"uid of {name}", "labels": {"app": "vllm"} | (labels or {})}
        self.change(PODS, name, {"metadata": metadata | {"annotations": annotations or {}}})

    def delete(self, endpoint: str) -> None:
        self._remove(SLICES, endpoint)

    def workload(self, collection: str, name: str, replicas: int = 0) -> None:
        """Add a workload."""
        self.change(collection, name, {"metadata": {}, "spec": {"replicas": replicas}})
        self._settle(collection, name)

    def scale(self, collection: str, name: str, replicas: int) -> None:
        """Set the count of a workload."""
        found = self._objects[collection][name]
        if found["spec"]["replicas"] != replicas:
            self.change(collection, name, {**found, "spec": {"replicas": replicas}})
            self._settle(collection, name)

    def pods(self, owner: str) -> list[dict[str, Any]]:
        """The pods of a workload that are replicas, oldest first."""
        found = [pod for pod in self._objects.get(PODS, {}).values() if _has(pod, f"app={owner}")]
        return [pod for pod in found if pod["metadata"]["labels"].get(WORKER_INDEX, "0") == "0"]

    def become_ready(self) -> None:
        """Let all pods start."""
        for pod in list(self._objects.get(PODS, {}).values()):
            self.change(PODS, pod["metadata"]["name"], {**pod, "status": self._status(ready=True)})

    def of(self, collection: str, name: str) -> dict[str, Any]:
        return self._objects[collection][name]

    def _settle(self, collection: str, name: str) -> None:
        """Start or end pods until the workload has its count; pods that end are replaced."""
        every = self.pods(name)
        pods = [pod for pod in every if "deletionTimestamp" not in pod["metadata"]]
        wanted = self._objects[collection][name]["spec"]["replicas"]
        if collection in NUMBERED:
            used = {pod["metadata"]["name"] for pod in every}
            missing = [each for each in (f"{name}-{i}" for i in range(wanted)) if each not in used]
            surplus = [pod for pod in pods if int(pod["metadata"]["name"].rpartition("-")[2]) >= wanted]
        else:
            missing = [f"{name}-{next(self._numbers)}x" for _ in range(wanted - len(pods))]
            surplus = pods[wanted:]
        for pod_name in missing:
            self._start_pod(collection, name, pod_name)
        for pod in surplus:
            self._end(pod["metadata"]["name"], self.drain_s)

    def _start_pod(self, collection: str, owner: str, name: str) -> None:
        created = datetime.now(UTC).isoformat()
        ports = [{"containerPort": self.pod_port, "name": "http"}]
        for i in range(GROUP if collection == LEADER_WORKER_SETS else 1):
            labels = {"app": owner} | ({WORKER_INDEX: str(i)} if collection == LEADER_WORKER_SETS else {})
            metadata = {"uid": f"{next(self._numbers):08}", "labels": labels, "of": collection}
            self.change(PODS, f"{name}-{i}" if i else name, {
                "metadata": metadata | {"creationTimestamp": created},
                "spec": {"nodeName": "node-1", "containers": [{"ports": ports}]},
                "status": self._status(ready=not self.slow),
            })  # fmt: skip

    def _status(self, *, ready: bool) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
        return {"podIP": "127.0.0.1", "conditions": [condition]}

    def _end(self, name: str, grace_s: float) -> None:
        """Let a pod end, and the workers of one that leads them."""
        for each in (name, *(f"{name}-{i}" for i in range(1, GROUP))):
            if (pod := self._objects[PODS].get(each)) is not None:
                metadata = pod["metadata"] | {"deletionTimestamp": datetime.now(UTC).isoformat()}
                self.change(PODS, each, {**pod, "metadata": metadata})
                asyncio.get_running_loop().call_later(grace_s, self._ended, each, pod["metadata"])

    def _ended(self, name: str, metadata: dict[str, Any]) -> None:
        self._remove(PODS, name)
        self._settle(metadata["of"], metadata["labels"]["app"])

    def change(self, collection: str, name: str, content: dict[str, Any]) -> None:
        """Write an object, as a client that names no version does."""
        objects = self._objects.setdefault(collection, {})
        kind = "MODIFIED" if name in objects else "ADDED"
        self._version += 1
        metadata = content["metadata"] | {"name": name, "resourceVersion": str(self._version)}
        objects[name] = {**content, "metadata": metadata}
        self._note(kind, collection, objects[name])
        if collection == PODS and self.endpoint:
            pods = [pod for pod in objects.values() if "deletionTimestamp" not in pod["metadata"]]
            if pods and not self._objects.get(SLICES):
                self.put(self.endpoint)
            elif not pods and self._objects.get(SLICES):
                self.delete(self.endpoint)

    def _remove(self, collection: str, name: str) -> None:
        self._version += 1
        gone = self._objects[collection].pop(name)
        metadata = gone["metadata"] | {"resourceVersion": str(self._version)}
        self._note("DELETED", collection, {**gone, "metadata": metadata})

    def _note(self, kind: str, collection: str, changed: dict[str, Any]) -> None:
        self._history.append((collection, {"type": kind, "object": changed}))
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                method, target = line.decode().split()[:2]
                length = 0
                while (header := await reader.readline()).strip():
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                body = json.loads(await reader.readexactly(length) or b"null")
                self.paths.append(target)
                parts = urlsplit(target)
                query = parse_qs(parts.query)
                refused = self.refuses(f"{method} {target}")
                if "watch" not in query or refused:
                    await self.before(f"{method} {target}")
                    found = refused or self._called(method, unquote(parts.path), query, body)
                    await self.after(f"{method} {target}")
                    status = found if isinstance(found, int) else 200
                    data = json.dumps(found).encode()
                    writer.write(b"HTTP/1.1 %d -\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                async for event in self._events(parts.path, query):
                    data = json.dumps(event).encode() + b"\n"
                    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _called(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> Any:
        """The answer of a request that is no watch, or the status of one that is refused."""
        scale = path.endswith("/scale")
        collection, _, name = path.removesuffix("/scale").rpartition("/")
        if path in COLLECTIONS:
            items = [each for each in self._objects.get(path, {}).values() if _matches(each, query)]
            return {"metadata": {"resourceVersion": str(self._version)}, "items": items}
        if name not in self._objects.get(collection, {}):
            return 404
        metadata = self._objects[collection][name]["metadata"]
        if method == "DELETE":
            wanted = body.get("preconditions", {})
            if any(metadata[key] != value for key, value in wanted.items()):
                return 409
            self._end(name, 0.0 if body.get("gracePeriodSeconds") == 0 else self.drain_s)
            self._settle(metadata["of"], metadata["labels"]["app"])
        elif method == "PATCH":
            version = body.get("metadata", {}).pop("resourceVersion", metadata["resourceVersion"])
            if version != metadata["resourceVersion"]:
                return 409
            self.change(collection, name, merged(self._objects[collection][name], body))
            self._settle(collection, name)
        found = self._objects[collection][name]
        selector = f"app={name}" + (f",{WORKER_INDEX}=0" if collection == LEADER_WORKER_SETS else "")
        selector = selector if self.selects else ""
        return {"spec": found["spec"], "status": {"selector": selector}} if scale else found

    async def _events(self, path: str, query: dict[str, list[str]]) -> AsyncIterator[dict[str, Any]]:
        version = int(query["resourceVersion"][0])
        if self.forgotten:
            self.forgotten -= 1
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
            return
        while True:
            changed = self._changed
            for collection, event in self._history:
                if int(event["object"]["metadata"]["resourceVersion"]) > version:
                    version = int(event["object"]["metadata"]["resourceVersion"])
                    if collection == path and _matches(event["object"], query):
                        yield event
            yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
            await changed.wait()
            if self._server is not None and not self._server.is_serving():
                return


async def _at_once(asked: str) -> None:
    """No pause."""


def _matches(found: dict[str, Any], query: dict[str, list[str]]) -> bool:
    """Whether an object has the labels, or the name, that the query selects."""
    if "fieldSelector" in query:
        return query["fieldSelector"] == [f"metadata.name={found['metadata']['name']}"]
    return _has(found, query["labelSelector"][0])


def _has(found: dict[str, Any], selector: str) -> bool:
    labels = found["metadata"].get("labels", {})
    return all(
        labels.get(name) == value for name, _, value in (it.partition("=") for it in selector.split(","))
    )


def merged(one: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    base = dict(one) if isinstance(one, dict) else {}
    for key, value in patch.items():
        base[key] = merged(base.get(key), value)
        if value is None:
            del base[key]
    return base


@contextmanager
def running_elsewhere(api: KubernetesApi) -> Iterator[None]:
    """Serve ``api`` in a thread with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(api.start(), loop).result()
    try:
        yield
    finally:

        async def end() -> None:
            await api.stop()
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

        asyncio.run_coroutine_threadsafe(end(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
