"""A double of the API server of Kubernetes: list, watch, scale, and workloads that make pods."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

SLICES = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
PODS = "/api/v1/namespaces/models/pods"
DEPLOYMENTS = "/apis/apps/v1/namespaces/models/deployments"
STATEFUL_SETS = "/apis/apps/v1/namespaces/models/statefulsets"
LEADER_WORKER_SETS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/models/leaderworkersets"


class KubernetesApi:
    """Objects by the path of their collection and by name. ``paths`` are the paths and queries of requests.

    Endpoints are ``HOST:PORT`` of the service `vllm`, one slice each. Pods of a workload are ready at once,
    unless it is ``slow``, and end ``drain_s`` after they were deleted, the newest first. If it is set,
    ``endpoint`` is one of the service while any pod is ready.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.forgotten = 0
        self.slow = False
        self.endpoint = ""
        self.drain_s = 0.2
        self.pod_port = 8000
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

    def put(self, endpoint: str, *, ready: bool | None = True, port_name: str = "http") -> None:
        """Add an endpoint, or change whether it is ready."""
        host, _, port = endpoint.rpartition(":")
        conditions = {"ready": ready, "terminating": ready is False}
        self._change(SLICES, endpoint, {
            "metadata": {"labels": {"kubernetes.io/service-name": "vllm"}},
            "endpoints": [{"addresses": [host], "conditions": conditions}],
            "ports": [{"port": 9, "name": "metrics"}, {"port": int(port), "name": port_name}],
        })  # fmt: skip

    def delete(self, endpoint: str) -> None:
        self._remove(SLICES, endpoint)

    def workload(self, collection: str, name: str, replicas: int = 0) -> None:
        """Add a workload."""
        self._change(collection, name, {"metadata": {}, "spec": {"replicas": replicas}})
        self._settle(collection, name)

    def scale(self, collection: str, name: str, replicas: int) -> None:
        """Set the count of a workload."""
        found = self._objects[collection][name]
        if found["spec"]["replicas"] != replicas:
            self._change(collection, name, {**found, "spec": {"replicas": replicas}})
            self._settle(collection, name)

    def pods(self, owner: str) -> list[dict[str, Any]]:
        """The pods of a workload, oldest first."""
        found = self._objects.get(PODS, {}).values()
        return [pod for pod in found if pod["metadata"]["labels"]["app"] == owner]

    def become_ready(self) -> None:
        """Let all pods start."""
        for pod in list(self._objects.get(PODS, {}).values()):
            self._change(PODS, pod["metadata"]["name"], {**pod, "status": self._status(ready=True)})

    def of(self, collection: str, name: str) -> dict[str, Any]:
        return self._objects[collection][name]

    def _settle(self, collection: str, name: str) -> None:
        """Start or end pods until the workload has its count; pods that end are replaced."""
        pods = [pod for pod in self.pods(name) if "deletionTimestamp" not in pod["metadata"]]
        wanted = self._objects[collection][name]["spec"]["replicas"]
        for _ in range(wanted - len(pods)):
            created = datetime.now(UTC).isoformat()
            metadata = {"labels": {"app": name}, "creationTimestamp": created, "of": collection}
            ports = [{"containerPort": self.pod_port, "name": "http"}]
            spec = {"nodeName": "node-1", "containers": [{"ports": ports}]}
            status = self._status(ready=not self.slow)
            number = next(self._numbers)
            self._change(PODS, f"{name}-{number}", {"metadata": metadata, "spec": spec, "status": status})
        for pod in pods[wanted:]:
            self._end(pod["metadata"]["name"], self.drain_s)

    def _status(self, *, ready: bool) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        condition = {"type": "Ready", "status": str(ready), "lastTransitionTime": now}
        return {"podIP": "127.0.0.1", "conditions": [condition]}

    def _end(self, name: str, grace_s: float) -> None:
        pod = self._objects[PODS][name]
        metadata = pod["metadata"] | {"deletionTimestamp": datetime.now(UTC).isoformat()}
        self._change(PODS, name, {**pod, "metadata": metadata})
        asyncio.get_running_loop().call_later(grace_s, self._remove, PODS, name)

    def _change(self, collection: str, name: str, content: dict[str, Any]) -> None:
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
                if "watch" not in query:
                    found = self._called(method, unquote(parts.path), query, body)
                    status = b"404 Not Found" if found is None else b"200 OK"
                    data = json.dumps(found).encode()
                    writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(data), data))
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
        """The answer of a request that is no watch; ``None`` for what does not exist."""
        scale = path.endswith("/scale")
        collection, _, name = path.removesuffix("/scale").rpartition("/")
        if path in (SLICES, PODS, DEPLOYMENTS, STATEFUL_SETS):
            items = [each for each in self._objects.get(path, {}).values() if _matches(each, query)]
            return {"metadata": {"resourceVersion": str(self._version)}, "items": items}
        if name not in self._objects.get(collection, {}):
            return None
        if method == "DELETE":
            owner = self._objects[collection][name]["metadata"]
            self._end(name, 0.0 if body.get("gracePeriodSeconds") == 0 else self.drain_s)
            self._settle(owner["of"], owner["labels"]["app"])
        elif method == "PATCH":
            self._change(collection, name, _merged(self._objects[collection][name], body))
            self._settle(collection, name)
        found = self._objects[collection][name]
        return {"spec": found["spec"], "status": {"selector": f"app={name}"}} if scale else found

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


def _matches(found: dict[str, Any], query: dict[str, list[str]]) -> bool:
    """Whether an object has the label that the query selects."""
    name, _, value = query["labelSelector"][0].partition("=")
    return bool(found["metadata"].get("labels", {}).get(name) == value)


def _merged(one: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    base = dict(one) if isinstance(one, dict) else {}
    for key, value in patch.items():
        base[key] = _merged(base.get(key), value)
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
