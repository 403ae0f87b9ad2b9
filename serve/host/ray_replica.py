"""The replica host as a Ray Serve replica. Serve starts and stops it; clients do not reach it through Ray."""

from __future__ import annotations

import asyncio

import msgspec
import ray
from ray import serve as ray_serve
from ray.serve._private import replica as serve_replica

from policy.errors import EngineFailed
from serve.host.gpu_group_host import HostProcessSpec, host_of
from serve.host.heartbeat import send_heartbeats
from serve.host.replica_host import HostSpec
from serve.host.version_check import NodeVersions, installed, refuse_other


class _Sender(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a :class:`serve.host.replica_host.HostSpec` that every version can read."""

    versions: NodeVersions


def _listen_on_loopback() -> None:
    """Let the server with which Serve's replicas call each other, unused here, listen on loopback alone.

    Serve makes it after the replica's class, on every interface, and has no option for that.
    """
    listen = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, _address: listen(server, "127.0.0.1:0")


class RayHost:
    """Holds the resources granted by Ray, for one engine or for those of a shared GPU group."""

    def __init__(self, encoded: bytes) -> None:
        refuse_other(msgspec.json.decode(encoded, type=_Sender).versions, installed())
        spec = msgspec.json.decode(encoded, type=HostSpec)
        if spec.loopback:
            _listen_on_loopback()
        unique = ray_serve.get_replica_context().replica_id.unique_id
        name = spec.model.name.replace("/", ".")
        self._host = host_of(
            HostProcessSpec(
                spec=spec,
                replica=f"{name}-{spec.shape}-g{spec.generation}-{unique}",
                address="127.0.0.1" if spec.loopback else ray.util.get_node_ip_address(),
                node=ray.get_runtime_context().get_node_id()[:8],
            )
        )
        self._beating: asyncio.Task[None] | None = None
        self._started: asyncio.Task[None] | None = None

    async def check_health(self) -> None:
        """Serve's health check. The first call waits until the engine is ready.

        Serve considers a replica as starting until this call returns, and stops starting ones first.
        """
        if self._started is None:
            self._beating = asyncio.create_task(send_heartbeats(self._host.replicas))
            self._started = asyncio.create_task(self._host.start())
        await asyncio.shield(self._started)
        if self._host.lost.is_set():
            raise EngineFailed("the engine failed too often in a row, or was ordered to leave")

    async def __call__(self) -> None:
        """Unused: a replica is reached on its own port."""

    async def __del__(self) -> None:
        """Serve awaits this when the replica stops: drain, then end the engine."""
        await self._host.drain()
        await self._host.stop()
        if self._beating is not None:
            await self._beating
