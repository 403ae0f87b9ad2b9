"""A replica host as a process of this machine: ``tidegate run --no-ray``.

Standard input carries one JSON line, the :class:`LocalHost`. SIGTERM drains and ends it.
"""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import uvloop

from serve.host.heartbeat import send_heartbeats
from serve.host.replica_host import HostSpec
from serve.host.shared_gpu_host import host_of


class LocalHost(msgspec.Struct, frozen=True, kw_only=True):
    """What the local actuator hands to a host process."""

    replica: str
    spec: HostSpec


async def _run(local: LocalHost) -> int:
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    host = host_of(local.spec, replica=local.replica, address="127.0.0.1", node="local")
    beating = asyncio.create_task(send_heartbeats(host.replicas))
    # A start that fails loses the host.
    starting = asyncio.create_task(host.start())
    ends = {asyncio.create_task(event.wait()) for event in (stopping, host.lost)}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    code = int(not stopping.is_set())
    for task in (starting, *ends):
        task.cancel()
    await host.drain()
    await host.stop()
    await asyncio.gather(starting, *ends, return_exceptions=True)
    await beating
    return code


def main() -> None:
    """Entry point of the process."""
    local = msgspec.json.decode(sys.stdin.buffer.readline(), type=LocalHost)
    sys.exit(uvloop.run(_run(local)))


if __name__ == "__main__":
    main()
