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

from store.os_process import find, start_key
from store.state_dir import private_directory


class CoreSet(msgspec.Struct, frozen=True):
    """Cores claimed by the process ``pid`` that started at ``created`` and has the ``start_key``.

    The key is empty in a claim of a version that kept none.
    """

    pid: int
    created: float
    cores: tuple[int, ...]
    start_key: str = ""


@contextmanager
def _claims(path: Path) -> Iterator[list[CoreSet]]:
    """The claims of this node's live processes, under a lock. The list is stored when the block ends."""
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = file.read()
        kept = msgspec.json.decode(data, type=list[CoreSet]) if data else []
        live = [
            claim if claim.start_key else msgspec.structs.replace(claim, start_key=start_key(claim.pid))
            for claim in kept
            if find(claim.pid, claim.created, claim.start_key) is not None
        ]
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
        live.append(CoreSet(this, psutil.Process(this).create_time(), chosen, start_key(this)))
    return chosen


def default_path() -> Path:
    """The claims file that every Tidegate process of this user on this node shares."""
    return private_directory() / "cores.json"
