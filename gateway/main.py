"""The process of a gateway worker: its command line, memory and garbage collector settings.

``python -m gateway.main --state DIR --fd N --admin-fd M --worker I``; the supervisor binds both
sockets, so that a worker can be replaced without closing the port."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import sys
from pathlib import Path

import uvloop

from store import mypyc_cache
from store.os_process import allow_connections
from store.state_dir import StateDir

# glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# Larger blocks are mapped, as those of gateway.protocol.byte_accumulator: the heap gives memory back in one
# step, which takes 70 ms where many were freed.
LARGEST_ON_HEAP = 1024 * 1024 - 1

KEPT_BYTES = 64 * 1024 * 1024

# Objects made and not freed until the collector looks for cycles among them.
YOUNGEST = 10_000


def keep_freed_memory() -> None:
    """Allocate bodies from the heap, and give it back only beyond :data:`KEPT_BYTES`; glibc only.

    By default glibc maps blocks of 128 KiB anew: to copy 240 KB takes 430 us for page faults, not 25.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_ON_HEAP)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def collect_seldom() -> None:
    """Exempt what exists from collections, and collect only after :data:`YOUNGEST` new objects.

    Calls free their objects by reference counts; the default, every 700 objects, costs a sixth of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m gateway.main", description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="the state directory")
    parser.add_argument("--fd", type=int, required=True, help="the listening client socket")
    parser.add_argument("--admin-fd", type=int, required=True, help="the listening admin socket")
    parser.add_argument("--worker", type=int, default=0, help="this worker's number; 0 saves the fleet")
    given = parser.parse_args()
    fast = mypyc_cache.use()
    # Only now: what it imports is either compiled or not.
    from gateway.telemetry.metrics import DIRECTORY_VARIABLE  # noqa: PLC0415
    from gateway.worker import work  # noqa: PLC0415

    allow_connections()
    keep_freed_memory()
    collect_seldom()
    if directory := os.environ.get(DIRECTORY_VARIABLE):
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work(StateDir(given.state), given.fd, given.admin_fd, given.worker, compiled=fast))


if __name__ == "__main__":
    main()
