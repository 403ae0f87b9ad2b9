"""A replica host as a process of this machine: ``tidegate run --no-ray``.

Its argument is the replica's id. Standard input carries one JSON line, the
:class:`serve.host.replica_host.HostSpec`. SIGTERM drains and ends it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import msgspec
import uvloop

from serve.host.heartbeat import send_heartbeats
from serve.host.replica_host import HostSpec
from serve.host.shared_gpu_host import host_of
from store.log_lines import log_to


async def _run(spec: HostSpec, replica: str) -> int:
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    host = host_of(spec, replica=replica, address="127.0.0.1", node="local")
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
    log_to(logging.StreamHandler())
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=HostSpec)
    sys.exit(uvloop.run(_run(spec, sys.argv[1])))


if __name__ == "__main__":
    main()
