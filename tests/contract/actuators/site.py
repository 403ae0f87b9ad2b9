"""Helpers of the actuator contracts: heartbeats of replica hosts, received as by a controller."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

from policy.config.deployment import Deployment
from policy.scaling.reconcile_steps import LayerKey
from policy.types import Replica, ReplicaPhase
from policy.wire.headers import SECRET_HEADER
from policy.wire.heartbeat import Heartbeat, HeartbeatResponse
from serve.actuator.interface import Actuator
from tests.serve.memory_actuator import MemoryCluster

WITHIN_S = 240.0
ActuatorT = TypeVar("ActuatorT", bound=Actuator)


@dataclass
class Backend:
    """Where replicas run: in ``cluster`` in memory, in Kubernetes, on this machine, or on a Ray cluster.

    ``models`` are those of the deployment, as it is written; none for the usual one. Replicas that are
    ``numbered`` have places: when the count falls, the one in the last place ends.
    """

    make: Callable[[], Actuator]
    controller: str = "127.0.0.1:1"
    secret: str = ""
    cluster: MemoryCluster | None = None
    models: tuple[dict[str, Any], ...] = ()
    has_processes: bool = True
    numbered: bool = False
    receive: Callable[[Replica], HeartbeatResponse | None] = lambda replica: None


@dataclass
class Site(Generic[ActuatorT]):
    """An actuator that can be restarted, and the replicas that are not stopped, by id.

    ``phases`` has the phases of each replica in order; ``leaving`` the reasons for replicas ordered to leave;
    ``ended`` the engines that were lost, by process id.
    """

    backend: Backend
    make: Callable[[], ActuatorT]
    deployment: Deployment
    replicas: dict[str, Replica] = field(default_factory=dict)
    phases: dict[str, list[ReplicaPhase]] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.actuator = self.make()
        self.backend.receive = self.receive

    def receive(self, replica: Replica) -> HeartbeatResponse | None:
        if replica.pid in self.ended:  # sent before its end
            return None
        seen = self.phases.setdefault(replica.id, [])
        if not seen or seen[-1] is not replica.state:
            seen.append(replica.state)
        self.replicas[replica.id] = replica
        if replica.state is ReplicaPhase.STOPPED:
            del self.replicas[replica.id]
        return self.orders(replica)

    def lose(self, replica: str) -> None:
        """Forget a replica whose host was killed, as a controller does when its port refuses."""
        if (lost := self.replicas.pop(replica, None)) is not None and lost.pid:
            self.ended.add(lost.pid)

    def orders(self, replica: Replica) -> HeartbeatResponse | None:
        return HeartbeatResponse(leave=self.leaving[replica.id]) if replica.id in self.leaving else None

    def layer(self, key: LayerKey, *phases: ReplicaPhase) -> dict[str, int]:
        """The process ids of a layer's replicas in one of ``phases``, or in any, by replica id."""
        return {
            replica.id: replica.pid
            for replica in list(self.replicas.values())
            if (replica.model, replica.shape, replica.generation) == (key.model, key.shape, key.generation)
            and replica.state in (phases or ReplicaPhase)
        }

    async def end(self) -> None:
        await self.actuator.stop()
        await self.actuator.close()
        # Also of a restarted actuator: the event loop must notice the end of its children before it closes.
        for thread in threading.enumerate():
            if thread.name.startswith("asyncio-waitpid-"):
                await asyncio.to_thread(thread.join, WITHIN_S)

    async def restart(self) -> None:
        await self.actuator.close()
        self.actuator = self.make()

    async def deploy(self, count: int, key: LayerKey, digest: str = "d1") -> None:
        await self.actuator.deploy(key, self.deployment.models[0], None, digest, count)

    async def ready(self, count: int, key: LayerKey) -> dict[str, int]:
        """The process ids by replica, once ``count`` of them are ready and no other is left."""
        await self.until(lambda: len(self.layer(key, ReplicaPhase.READY)) == len(self.layer(key)) == count)
        return self.layer(key)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                # As a controller does each tick; the local actuator notices ended processes by it.
                await self.actuator.layers()
                if self.backend.cluster is not None:
                    self.backend.cluster.beat_all()
                await asyncio.sleep(0 if self.backend.cluster is not None else 0.05)


# Made before there are threads: two that decode a type for the first time at once can crash in msgspec.
_HEARTBEATS = msgspec.json.Decoder(Heartbeat)


@contextmanager
def heartbeat_server(backend: Backend) -> Iterator[None]:
    """A minimal controller: ``POST /replicas`` with the secret, answered with ``backend.receive``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            known = self.path == "/replicas" and self.headers[SECRET_HEADER] == backend.secret
            orders = backend.receive(_HEARTBEATS.decode(body).replica) if known else None
            answer = b"" if orders is None else msgspec.json.encode(orders)
            self.send_response(200 if known else 401)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            return

    port = int(backend.controller.rpartition(":")[2])
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
