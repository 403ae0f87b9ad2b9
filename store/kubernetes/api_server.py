"""The API server of Kubernetes: a client, and objects that are followed by list and watch."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import httpx
import msgspec

from policy.stats.backoff import Backoff

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The API server ends a watch after this time, and another one follows.
WATCH_S = 300
# How long a call waits for the next part of an answer: less than a lease lasts.
TIMEOUT_S = 5.0
RETRY_S = 1.0
MAX_RETRY_S = 30.0
_MAX_LINE = 16 * 1024 * 1024
# A watch is silent while nothing changes: a connection whose other end is gone is noticed within 30 s.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class ObjectMetadata(msgspec.Struct, rename="camel"):
    """What is read of an object's metadata."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class ApiObject(Protocol):
    """An object of the API: a structure with its metadata."""

    metadata: ObjectMetadata


Object = TypeVar("Object", bound=ApiObject)


class _List(msgspec.Struct):
    """Of a Go server, for which no items may be ``null``."""

    metadata: ObjectMetadata
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Versioned(msgspec.Struct):
    metadata: ObjectMetadata


class _Status(msgspec.Struct):
    """Why a watch ended."""

    code: int = 0
    message: str = ""


class _Gone(Exception):
    """The API server forgot where the watch was (410): list again."""


class AccountToken(httpx.Auth):
    """The token of a service account. The kubelet renews it: it is read for each request."""

    def __init__(self, account: Path) -> None:
        self._path = account / "token"

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["authorization"] = f"Bearer {self._path.read_text().strip()}"
        yield request


def api_client(api: str = "") -> httpx.AsyncClient:
    """A client of the API server at ``api``, by default the cluster's with the rights of this pod.

    Raises ``OSError`` outside of a pod if no API server is named.
    """
    if api:
        # Without TLS: to read the system's certificates costs more than the call.
        return _client(api, api.startswith("https:"))
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise OSError("this is no pod of Kubernetes: set discovery.kubernetes.api")
    trusted = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    return _client(f"https://{f'[{host}]' if ':' in host else host}:{port}", trusted, AccountToken(ACCOUNT))


def _client(url: str, verify: ssl.SSLContext | bool, auth: httpx.Auth | None = None) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, socket_options=_KEEPALIVE)
    return httpx.AsyncClient(base_url=url, auth=auth, timeout=TIMEOUT_S, transport=transport, trust_env=False)


def own_namespace() -> str:
    """The pod's namespace, or ``default`` outside of one."""
    try:
        return (ACCOUNT / "namespace").read_text().strip()
    except OSError:
        return "default"


class ObjectWatch(Generic[Object]):
    """Follows the objects of a path that a ``query`` selects, from :meth:`start` until :meth:`close`.

    ``objects`` are those by name, ``None`` until they were listed; they stay while the API server does not
    answer. ``failed`` is called with the first error of a failure.
    """

    def __init__(
        self,
        api: str,
        path: str,
        query: Mapping[str, str],
        kind: type[Object],
        *,
        on_change: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._api, self._path, self._query = api, path, dict(query)
        self._decode = msgspec.json.Decoder(kind).decode
        self._on_change = on_change
        self._failed = failed
        self._failures = 0
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
        clock = asyncio.get_running_loop().time
        while True:
            delay_s, began = RETRY_S, math.inf
            try:
                async with await asyncio.to_thread(api_client, self._api) as client:
                    version = await self._list(client)
                    while True:
                        began = clock()
                        version = await self._watch(client, version)
                        # A proxy may end each at once.
                        await asyncio.sleep(max(0.0, began + RETRY_S - clock()))
            except _Gone:
                pass
            except (httpx.HTTPError, OSError, ValueError) as error:
                # A watch that lasted did not fail for what the ones before it did.
                self._failures = 1 if clock() > began + MAX_RETRY_S else self._failures + 1
                if self._failures == 1:
                    self._failed(error)
                delay_s = max(Backoff(RETRY_S, MAX_RETRY_S).delay_s(self._failures), retry_after_s(error))
            await asyncio.sleep(delay_s)

    async def _list(self, client: httpx.AsyncClient) -> str:
        """Replace all objects; returns the version to watch from."""
        answer = await client.get(self._path, params=self._query)
        answer.raise_for_status()
        listed = msgspec.json.decode(answer.content, type=_List)
        found = (self._decode(each) for each in listed.items or ())
        self.objects = {each.metadata.name: each for each in found}
        self.listed.set()
        self._on_change()
        return listed.metadata.resource_version

    async def _watch(self, client: httpx.AsyncClient, version: str) -> str:
        """Apply changes until the API server ends the watch; returns the version of the last one."""
        query = self._query | {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_S)}
        query["allowWatchBookmarks"] = "true"
        timeout = httpx.Timeout(TIMEOUT_S, read=WATCH_S + TIMEOUT_S)
        async with client.stream("GET", self._path, params=query, timeout=timeout) as answer:
            if answer.status_code == httpx.codes.GONE:
                raise _Gone
            answer.raise_for_status()
            rest = b""
            async for data in answer.aiter_bytes():
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _MAX_LINE:
                    raise ValueError(f"an event of a watch has more than {_MAX_LINE} bytes")
                for line in lines:
                    if line.strip():
                        version = self._apply(msgspec.json.decode(line, type=_Event)) or version
        self._failures = 0
        return version

    def _apply(self, event: _Event) -> str:
        """Apply a change; returns its version."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == httpx.codes.GONE:
                raise _Gone
            raise ValueError(f"the watch ended with {status.code}: {status.message[:300]}")
        # Not before: who may list may not always watch.
        self._failures = 0
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


def retry_after_s(error: Exception) -> float:
    """How long an answer such as 429 asks to wait, at most :data:`MAX_RETRY_S`."""
    given = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    return min(MAX_RETRY_S, float(given)) if given.isdecimal() else 0.0
