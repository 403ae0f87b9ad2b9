"""CPU core assignment: a replica gets the cores of its node with the fewest other claims."""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil

from store.os_process import ProcessId, start_key
from store.state_dir import private_directory


class CoreSet(ProcessId, frozen=True, kw_only=True):
    """The cores that a process claimed."""

    cores: tuple[int, ...]


@contextmanager
def _claims(path: Path) -> Iterator[list[CoreSet]]:
    """The claims of this node's live processes, under a lock. The list is stored when the block ends."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = file.read()
        kept = msgspec.json.decode(data, type=list[CoreSet]) if data else []
        live = [claim.with_key() for claim in kept if claim.process() is not None]
        yield live
        file.seek(0)
        file.truncate()
        file.write(msgspec.json.encode(live))


def claim_cores(path: Path, count: int, cores: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Claim ``count`` of this node's cores for the calling process, until it ends.

    Cores may be claimed more than once: during a mode switch the old and the new shape share them. The cores
    with the fewest claims come first, so replicas of one mode do not overlap.
    """
    available = cores if cores is not None else tuple(sorted(os.sched_getaffinity(0)))
    with _claims(path) as live:
        taken = Counter(core for held in live for core in held.cores)
        chosen = tuple(sorted(sorted(available, key=lambda core: (taken[core], core))[:count]))
        this = os.getpid()
        created = psutil.Process(this).create_time()
        live.append(CoreSet(pid=this, created=created, start_key=start_key(this), cores=chosen))
    return chosen


def default_path() -> Path:
    """The claims file that every Tidegate process of this user on this node shares."""
    return private_directory() / "cores.json"
