"""A replica host as a process of its own: without Ray, and for each engine of a shared GPU group.

Its argument is the replica's id. Standard input carries one JSON line, the
:class:`serve.host.gpu_group_host.HostProcessSpec`. SIGTERM drains and ends it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from serve.host.gpu_group_host import Host, HostProcessSpec, host_of, show_life, until_unheld
from serve.host.heartbeat import send_heartbeats
from store.json_log_format import log_to

log = logging.getLogger("tidegate.host")


async def _run(assignment: HostProcessSpec) -> int:
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopping.set)
    host = host_of(assignment)
    beating = asyncio.create_task(send_heartbeats(host.replicas))
    starting = asyncio.create_task(host.start())
    for task in (beating, starting):
        task.add_done_callback(partial(_lose_failed, host))
    living: asyncio.Task[None] | None = None
    ends: set[asyncio.Task[Any]] = {asyncio.create_task(event.wait()) for event in (stopping, host.lost)}
    if assignment.slot is not None:
        folder = Path(assignment.folder)
        ends.add(asyncio.create_task(until_unheld(folder)))
        living = asyncio.create_task(show_life(folder, assignment.replica))
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    code = int(not stopping.is_set())
    for task in (starting, *ends):
        task.cancel()
    await host.drain()
    await host.stop()
    if living is not None:
        living.cancel()
    await asyncio.gather(starting, *ends, return_exceptions=True)
    await beating
    return code


def _lose_failed(host: Host, task: asyncio.Task[None]) -> None:
    """Let a host be replaced whose start or heartbeats fail: nothing else would end it."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the host fails: %s", error)
        host.lost.set()


def main() -> None:
    """Entry point of the process."""
    log_to(logging.StreamHandler())
    assignment = msgspec.json.decode(sys.stdin.buffer.readline(), type=HostProcessSpec)
    sys.exit(uvloop.run(_run(assignment)))


if __name__ == "__main__":
    main()
