"""The ready endpoints of a Kubernetes service, by list and watch of its EndpointSlices."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec

from gateway.telemetry.structured_log import Log
from policy.config.external_servers import KubernetesService

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The API server ends a watch after this time, and another one follows.
WATCH_S = 300
TIMEOUT_S = 10.0
RETRY_S = 1.0
# How long the first call waits for the first list.
FIRST_S = 5.0
_MAX_LINE = 16 * 1024 * 1024


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = msgspec.field(default_factory=_Conditions)


class _Port(msgspec.Struct):
    port: int | None = None
    name: str | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[_Slice] = []


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _WatchEnded(Exception):
    """The API server forgot where the watch was (410), or refused it: list again."""


class EndpointSlices:
    """Follows one service from the first call of :meth:`addresses` until :meth:`close`."""

    def __init__(self, service: KubernetesService, log: Log, on_change: Callable[[], None]) -> None:
        self._service = service
        self._log = log
        self._on_change = on_change
        self._slices: dict[str, _Slice] | None = None
        self._listed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def addresses(self) -> list[tuple[str, int]] | None:
        """Address and port of each ready endpoint; ``None`` while none were listed."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._listed.wait(), FIRST_S)
        if self._slices is None:
            return None
        found: set[tuple[str, int]] = set()
        for each in self._slices.values():
            port = self._port(each)
            for endpoint in each.endpoints or ():
                # Unknown counts as ready. A pod that is to end is not, though it may still serve.
                if port and endpoint.conditions.ready is not False and not endpoint.conditions.terminating:
                    found |= {(address, port) for address in endpoint.addresses}
        return sorted(found)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _port(self, each: _Slice) -> int | None:
        wanted = self._service.port
        if isinstance(wanted, int):
            return wanted
        for port in each.ports or ():
            if wanted is None or port.name == wanted:
                return port.port
        return None

    async def _follow(self) -> None:
        failing = False
        while True:
            try:
                async with await asyncio.to_thread(self._client) as client:
                    version = await self._list(client)
                    failing = False
                    while True:
                        version = await self._watch(client, version)
            except (httpx.HTTPError, OSError, ValueError, _WatchEnded) as error:
                if not failing and not isinstance(error, _WatchEnded):
                    self._log.warning("kubernetes_failed", service=self._service.service, cause=error)
                    failing = True
            await asyncio.sleep(RETRY_S)

    def _client(self) -> httpx.AsyncClient:
        """A client of the API server; raises ``OSError`` outside of a pod if no API server is named."""
        timeout = httpx.Timeout(TIMEOUT_S, read=WATCH_S + TIMEOUT_S)
        if api := self._service.api:
            return httpx.AsyncClient(base_url=api, timeout=timeout, trust_env=False)
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
        if not host or not port:
            raise OSError("this is no pod of Kubernetes: set discovery.kubernetes.api")
        # The token is renewed: it is read for each connection.
        token = (ACCOUNT / "token").read_text().strip()
        return httpx.AsyncClient(
            base_url=f"https://{f'[{host}]' if ':' in host else host}:{port}",
            headers={"authorization": f"Bearer {token}"},
            verify=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")),
            timeout=timeout,
            trust_env=False,
        )

    def _path(self) -> tuple[str, dict[str, str]]:
        """The path of the service's slices (discovery.k8s.io/v1), and the query that selects them."""
        namespace = self._service.namespace or _own_namespace()
        selector = f"kubernetes.io/service-name={self._service.service}"
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return path, {"labelSelector": selector}

    async def _list(self, client: httpx.AsyncClient) -> str:
        """Replace all slices; returns the version to watch from."""
        path, query = self._path()
        answer = await client.get(path, params=query)
        answer.raise_for_status()
        listed = msgspec.json.decode(answer.content, type=_List)
        self._slices = {each.metadata.name: each for each in listed.items}
        self._listed.set()
        self._on_change()
        return listed.metadata.resource_version

    async def _watch(self, client: httpx.AsyncClient, version: str) -> str:
        """Apply changes until the API server ends the watch; returns the version of the last one."""
        path, query = self._path()
        query |= {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        query["allowWatchBookmarks"] = "true"
        async with client.stream("GET", path, params=query) as answer:
            if answer.status_code != httpx.codes.OK:
                raise _WatchEnded
            rest = b""
            async for data in answer.aiter_bytes():
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_LINE:
                    raise _WatchEnded
                for line in lines:
                    if line.strip():
                        version = self._apply(msgspec.json.decode(line, type=_Event)) or version
        return version

    def _apply(self, event: _Event) -> str:
        if event.type == "ERROR":
            raise _WatchEnded
        changed = msgspec.json.decode(event.object, type=_Slice)
        assert self._slices is not None  # they were listed before
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        elif event.type != "BOOKMARK":
            self._slices[changed.metadata.name] = changed
        if event.type != "BOOKMARK":
            self._on_change()
        return changed.metadata.resource_version


def _own_namespace() -> str:
    """The pod's namespace, or ``default`` outside of one."""
    try:
        return (ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return "default"
