"""The process of a gateway worker: its command line, memory and garbage collector settings.

``python -m gateway.main --state DIR --fd N --admin-fd M --worker I``; the supervisor binds both
sockets, so that a worker can be replaced without closing the port."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from pathlib import Path

import uvloop

from gateway.malloc_tuning import keep_freed_memory
from store import machine_code
from store.os_process import allow_connections
from store.state_dir import StateDir

# Objects made and not freed until the collector looks for cycles among them, and how often it does so before
# it looks at the survivors too: with the default of 10 times it looked at those of 600 streams for 23 ms. All
# are looked at about as seldom as by default.
YOUNGEST = 5_000
MIDDLE, OLDEST = 1, 100


def collect_seldom() -> None:
    """Exempt what exists from collections, and collect only after :data:`YOUNGEST` new objects.

    Calls free their objects by reference counts; the default, every 700 objects, costs a sixth of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST, MIDDLE, OLDEST)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.main", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the state directory")
    parser.add_argument("--fd", type=int, required=True, help="the listening client socket")
    parser.add_argument("--admin-fd", type=int, required=True, help="the listening admin socket")
    parser.add_argument("--worker", type=int, default=0, help="this worker's number; 0 saves the fleet")
    given = parser.parse_args()
    uncompiled = machine_code.use()
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
