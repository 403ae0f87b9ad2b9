"""The API server of Kubernetes: a client, and objects that are followed by list and watch."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import httpx
import msgspec

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The API server ends a watch after this time, and another one follows.
WATCH_S = 300
TIMEOUT_S = 10.0
RETRY_S = 1.0
_MAX_LINE = 16 * 1024 * 1024


class Metadata(msgspec.Struct, rename="camel"):
    """What is read of an object's metadata."""

    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class ApiObject(Protocol):
    """An object of the API: a structure with its metadata."""

    metadata: Metadata


Object = TypeVar("Object", bound=ApiObject)


class _List(msgspec.Struct):
    metadata: Metadata
    items: list[msgspec.Raw] = []


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct):
    metadata: Metadata


class _WatchEnded(Exception):
    """The API server forgot where the watch was (410), or refused it: list again."""


def api_client(api: str = "") -> httpx.AsyncClient:
    """A client of the API server at ``api``, by default the cluster's with the rights of this pod.

    Raises ``OSError`` outside of a pod if no API server is named.
    """
    timeout = httpx.Timeout(TIMEOUT_S, read=WATCH_S + TIMEOUT_S)
    if api:
        # Without TLS: to read the system's certificates costs more than the call.
        verify = api.startswith("https:")
        return httpx.AsyncClient(base_url=api, timeout=timeout, trust_env=False, verify=verify)
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


def own_namespace() -> str:
    """The pod's namespace, or ``default`` outside of one."""
    try:
        return (ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return "default"


class ObjectWatch(Generic[Object]):
    """Follows the objects of a path with the labels of ``selector``, from :meth:`start` until :meth:`close`.

    ``objects`` are those by name, ``None`` until they were listed; they stay while the API server does not
    answer. ``failed`` is called with the first error of a failure.
    """

    def __init__(
        self,
        api: str,
        path: str,
        selector: str,
        kind: type[Object],
        *,
        on_change: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._api, self._path, self._query = api, path, {"labelSelector": selector}
        self._decode = msgspec.json.Decoder(kind).decode
        self._on_change = on_change
        self._failed = failed
        self.objects: dict[str, Object] | None = None
        self.listed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Whether it was begun."""
        return self._task is not None

    def start(self) -> None:
        """Begin, once."""
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        failing = False
        while True:
            try:
                async with await asyncio.to_thread(api_client, self._api) as client:
                    version = await self._list(client)
                    failing = False
                    while True:
                        version = await self._watch(client, version)
            except (httpx.HTTPError, OSError, ValueError, _WatchEnded) as error:
                if not failing and not isinstance(error, _WatchEnded):
                    self._failed(error)
                    failing = True
            await asyncio.sleep(RETRY_S)

    async def _list(self, client: httpx.AsyncClient) -> str:
        """Replace all objects; returns the version to watch from."""
        answer = await client.get(self._path, params=self._query)
        answer.raise_for_status()
        listed = msgspec.json.decode(answer.content, type=_List)
        found = (self._decode(each) for each in listed.items)
        self.objects = {each.metadata.name: each for each in found}
        self.listed.set()
        self._on_change()
        return listed.metadata.resource_version

    async def _watch(self, client: httpx.AsyncClient, version: str) -> str:
        """Apply changes until the API server ends the watch; returns the version of the last one."""
        query = self._query | {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        query["allowWatchBookmarks"] = "true"
        async with client.stream("GET", self._path, params=query) as answer:
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
        """Apply a change; returns its version."""
        if event.type == "ERROR":
            raise _WatchEnded
        assert self.objects is not None  # they were listed before
        if event.type == "BOOKMARK":
            return msgspec.json.decode(event.object, type=_Versioned).metadata.resource_version
        changed = self._decode(event.object)
        if event.type == "DELETED":
            self.objects.pop(changed.metadata.name, None)
        else:
            self.objects[changed.metadata.name] = changed
        self._on_change()
        return changed.metadata.resource_version
