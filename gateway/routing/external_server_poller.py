"""Polls external servers: whether they answer, whether they serve the model, and how long their queue is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec

from gateway.http.http1_client import causes, client_tls_context, is_local_fault
from gateway.routing.discovered_server import (
    DiscoveredServer,
    external_replica,
    resolved,
    with_server_details,
)
from gateway.routing.external_server_options import ServerAccess
from gateway.routing.fleet import FleetView
from gateway.routing.server_discovery import ServerDiscovery
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import Deployment, ModelSpec
from policy.config.external_servers import ExternalServer
from policy.routing.concurrency_limit import ServerQueue
from policy.types import EngineKind, Replica
from policy.wire.vllm_metrics import VllmMetrics
from store.key_derivation import read_key

# Servers that come and go together are taken together.
COALESCE_S = 0.05
# The most names of models that are shown for a server that does not serve ours.
MAX_NAMES = 5
# Of an answer, which is decoded in one turn of the event loop.
MAX_LISTING = 1024 * 1024
# How often a server without vLLM's metrics is asked for them.
METRICS_EVERY_S = 10.0
_RUNNING, _WAITING = "num_requests_running", "num_requests_waiting"
_QUEUE = VllmMetrics(_RUNNING, _WAITING)
# httpx does not take every host of a URL: not an IPv4 address with 256, nor each name with an "xn--" label.
_UNREACHABLE = (httpx.HTTPError, httpx.InvalidURL, UnicodeError, OSError)


class PollTimes(NamedTuple):
    """How often servers are asked, and how long a probe waits for its answer, in seconds.

    A server that answers requests is asked for its models each ``list_every_s``, one with requests in flight
    for its queue each ``read_every_s``.
    """

    probe_every_s: float = 2.0
    probe_timeout_s: float = 2.0
    list_every_s: float = 10.0
    read_every_s: float = 1.0


TIMES = PollTimes()


class _Listed(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Listed] = []


class _Answer(NamedTuple):
    """The last answer of a server, when it came, and how many reads had come by then.

    ``late``: the probe after it was not answered in time.
    """

    replica: Replica
    access: ServerAccess
    max_model_len: int | None
    at: float
    reads: int
    late: bool = False


@dataclass(eq=False)
class ExternalPoller:
    """Probes every server of every external model, without any of Tidegate's secrets."""

    view: FleetView
    deployment: Callable[[], Deployment]
    log: StructuredLog
    times: PollTimes = TIMES

    def __post_init__(self) -> None:
        self._discovery = ServerDiscovery(self.log)
        self._servers: dict[str, tuple[DiscoveredServer, ...]] = {}
        # What is wrong with the shapes and modes of a model's servers, as it was logged.
        self._problems: dict[str, frozenset[str]] = {}
        self._clock = asyncio.get_running_loop().time
        self._answers: dict[tuple[str, str], _Answer] = {}
        # When servers without metrics are asked for them again.
        self._metrics_due: dict[str, float] = {}
        # By the file with the certificates that they trust, and when it was changed.
        self._clients: dict[tuple[str | None, int], httpx.AsyncClient] = {}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._probe_models())
                group.create_task(self._read_queues())
        finally:
            await self._discovery.close()
            for client in self._clients.values():
                await client.aclose()

    @property
    def _specs(self) -> list[ModelSpec]:
        return [spec for spec in self.deployment().models if spec.engine is EngineKind.EXTERNAL]

    async def _probe_models(self) -> None:
        while True:
            specs = self._specs
            await self._discovery.keep([spec.name for spec in specs if spec.discovery is not None])
            found = await asyncio.gather(*map(self._discovery.servers, specs))
            self._servers = {
                spec.name: self._resolved(spec, each) for spec, each in zip(specs, found, strict=True)
            }
            used = {(each.ca_file, _changed_ns(each.ca_file)) for servers in found for each in servers}
            for unused in self._clients.keys() - used:
                await self._clients.pop(unused).aclose()
            await asyncio.gather(*map(self._probe_model, specs))
            current = {(name, each.base) for name, servers in self._servers.items() for each in servers}
            self._answers = {key: answer for key, answer in self._answers.items() if key in current}
            bases = {base for _, base in current}
            self._metrics_due = {base: due for base, due in self._metrics_due.items() if base in bases}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._discovery.changed.wait(), self.times.probe_every_s)
                await asyncio.sleep(COALESCE_S)
            self._discovery.changed.clear()

    def _resolved(self, spec: ModelSpec, servers: Iterable[DiscoveredServer]) -> tuple[DiscoveredServer, ...]:
        found = tuple(resolved(each, spec, self.view.layer_of(spec.name, each.replica)) for each in servers)
        problems = frozenset(each.problem for each in found if each.problem)
        for problem in sorted(problems - self._problems.get(spec.name, frozenset())):
            self.log.warning("server_metadata_invalid", model=spec.name, problem=problem)
        self._problems[spec.name] = problems
        return found

    async def _read_queues(self) -> None:
        while True:
            await asyncio.sleep(self.times.read_every_s)
            busy = [
                self._read_queue(name, server)
                for name, servers in self._servers.items()
                for server in servers
                if self.view.learns_bound(name, server.base)
            ]
            await asyncio.gather(*busy)

    async def _read_queue(self, model: str, server: ExternalServer) -> None:
        """Learn the server's bound from its queue, if it has vLLM's metrics."""
        queue: ServerQueue | None = None
        if self._clock() >= self._metrics_due.get(server.base, 0.0):
            try:
                key, _ = read_key(server.key_file, server.key_env)
                _, body = await self._get(server, "/metrics", key, _changed_ns(server.ca_file))
                queue = _queue_of(body)
            except (*_UNREACHABLE, _NotServed):
                pass
            if queue is None:
                self._metrics_due[server.base] = self._clock() + METRICS_EVERY_S
        self.view.learn_bound(model, server.base, queue)

    async def _probe_model(self, spec: ModelSpec) -> None:
        found = await asyncio.gather(*(self._probe(spec.name, each) for each in self._servers[spec.name]))
        lengths = [answer.max_model_len for answer in found if answer.max_model_len is not None]
        asked = zip(self._servers[spec.name], found, strict=True)
        servers = [(with_server_details(server, answer.replica), answer.access) for server, answer in asked]
        self.view.set_external(spec.name, servers, min(lengths) if lengths else None)

    async def _probe(self, model: str, server: ExternalServer) -> _Answer:
        base, theirs = server.base, server.model or model
        key, problem = read_key(server.key_file, server.key_env)
        name, changed_ns = "" if theirs == model else theirs, _changed_ns(server.ca_file)
        access = ServerAccess(
            key,
            server.ca_file,
            name,
            changed_ns,
            server.max_in_flight,
            server.kv_events_port,
            server.kv_events_replay_port,
        )
        at, reads = self._clock(), self.view.reads(model, base)
        last = self._answers.pop((model, base), None)
        if last is not None and last.access != access:
            last = None
        if last is not None and reads > last.reads and at < last.at + self.times.list_every_s:
            answer = last._replace(reads=reads)
            self._answers[model, base] = answer
            return answer
        listed: list[_Listed] = []
        if not problem:
            try:
                listed = await self._models_of(server, key, changed_ns)
            except _UNREACHABLE as error:
                # A lack of resources on this machine is no failure of the server, and a single late answer
                # may be load: vLLM lists its models in the process that also writes all streams.
                late = isinstance(error, httpx.TimeoutException)
                if (
                    last is not None
                    and (is_local_fault(error) or (late and not last.late))
                    and self.view.is_answering(model, base)
                ):
                    self._answers[model, base] = last = last._replace(late=late)
                    return last
                problem = _cause(error, self.times.probe_timeout_s)
            except _NotServed as error:
                problem = str(error)
            else:
                problem = "" if any(entry.id == theirs for entry in listed) else _others(theirs, listed)
        adapters = tuple(entry.id for entry in listed if entry.parent is not None)
        length = next((entry.max_model_len for entry in listed if entry.id == theirs), None)
        replica = external_replica(model, base, adapters=adapters, at=self._clock(), reason=problem)
        answer = _Answer(replica, access, length, at, reads)
        if not problem:
            self._answers[model, base] = answer
        return answer

    async def _models_of(self, server: ExternalServer, key: bytes, changed_ns: int) -> list[_Listed]:
        """What the server lists; raises :data:`_UNREACHABLE` or :class:`_NotServed`."""
        status, body = await self._get(server, "/v1/models", key, changed_ns)
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            named = server.key_file or server.key_env
            wanted = f"refuses the API key of {named}" if key else "wants an API key: set key_file or key_env"
            raise _NotServed(f"answers {status}: it {wanted}")
        if status != httpx.codes.OK:
            raise _NotServed(f"answers {status} to GET /v1/models")
        try:
            return msgspec.json.decode(body, type=_Models).data
        except (ValueError, RecursionError):
            raise _NotServed("its answer to GET /v1/models is not a list of models") from None

    async def _get(self, server: ExternalServer, path: str, key: bytes, changed_ns: int) -> tuple[int, bytes]:
        """Status and body of an answer; raises :data:`_UNREACHABLE` or :class:`_NotServed`."""
        headers = {"authorization": f"Bearer {key.decode()}"} if key else {}
        url, client = server.base + path, await self._client(server.ca_file, changed_ns)
        async with client.stream("GET", url, headers={**headers, "accept-encoding": "identity"}) as answer:
            body = b""
            async for part in answer.aiter_raw():
                body += part
                if len(body) > MAX_LISTING:
                    raise _NotServed(f"its answer to GET {path} has more than {MAX_LISTING} bytes")
            return answer.status_code, body

    async def _client(self, ca_file: str | None, changed_ns: int) -> httpx.AsyncClient:
        """The client for servers with certificates by ``ca_file``; raises ``OSError`` if it is unusable."""
        trusts = ca_file, changed_ns
        if trusts not in self._clients:
            verify = await asyncio.to_thread(client_tls_context, ca_file, changed_ns)
        if trusts not in self._clients:  # another probe may have made it meanwhile
            self._clients[trusts] = httpx.AsyncClient(
                timeout=self.times.probe_timeout_s, trust_env=False, verify=verify
            )
        return self._clients[trusts]


def _changed_ns(path: str | None) -> int:
    """When the file was changed; 0 without one, or if it cannot be read."""
    try:
        return 0 if path is None else Path(path).stat().st_mtime_ns
    except OSError:
        return 0


class _NotServed(Exception):
    """The server answers, but does not serve the model; the message is the reason."""


def _queue_of(metrics: bytes) -> ServerQueue | None:
    """The sums over vLLM's engines; ``None`` where they are missing."""
    found = _QUEUE.read(metrics)
    return ServerQueue(found[_RUNNING], found[_WAITING]) if len(found) == 2 else None


def _others(theirs: str, listed: list[_Listed]) -> str:
    """The reason for a server that does not list ``theirs``."""
    names = [repr(entry.id) for entry in listed]
    shown = ", ".join(names[:MAX_NAMES]) or "no model"
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"does not serve {theirs!r}, but {shown}{more}: set the server's `model`"


def _cause(error: BaseException, timeout_s: float) -> str:
    """The reason for a server that gave no answer."""
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {timeout_s:g} s"
    cause = next((each for each in causes(error) if isinstance(each, OSError) and each.errno), None)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}"
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed: {cause.reason}"
    if cause is None or cause.errno is None:
        return str(error) or type(error).__name__
    return os.strerror(cause.errno).lower() if cause.errno > 0 else str(cause.strerror).lower()
