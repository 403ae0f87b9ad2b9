"""The process of a gateway worker: its command line, and what is set before it begins.

``python -m gateway.worker_main --state DIR --fd N --admin-fd M --worker I``; the supervisor binds both
sockets, so that a worker can be replaced without closing the port."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import uvloop

from gateway.garbage_collection import collect_seldom
from gateway.malloc_tuning import keep_freed_memory
from store import compiled_modules
from store.os_process import allow_connections
from store.state_dir import StateDir


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.worker_main", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the state directory")
    parser.add_argument("--fd", type=int, required=True, help="the listening client socket")
    parser.add_argument("--admin-fd", type=int, required=True, help="the listening admin socket")
    parser.add_argument("--worker", type=int, default=0, help="this worker's number; 0 saves the fleet")
    given = parser.parse_args()
    uncompiled = compiled_modules.use()
    # Only now: what it imports is either compiled or not.
    from gateway.telemetry.metrics import DIRECTORY_VARIABLE  # noqa: PLC0415
    from gateway.worker import work  # noqa: PLC0415

    allow_connections()
    keep_freed_memory()
    collect_seldom()
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(StateDir(given.state), given.fd, given.admin_fd, given.worker, uncompiled=uncompiled))


if __name__ == "__main__":
    main()
