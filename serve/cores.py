"""Which CPU cores a replica computes on: the least claimed ones of its node."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil


class Claim(msgspec.Struct, frozen=True):
    """Cores taken by the process ``pid`` that started at ``created``."""

    pid: int
    created: float
    cores: tuple[int, ...]


@contextmanager
def _claims(path: Path) -> Iterator[list[Claim]]:
    """The live claims of this node under a lock; what the caller leaves in the list is kept."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        data = file.read()
        kept = msgspec.json.decode(data, type=list[Claim]) if data else []
        live = [claim for claim in kept if _alive(claim)]
        yield live
        file.seek(0)
        file.truncate()
        file.write(msgspec.json.encode(live))


def _alive(claim: Claim) -> bool:
    try:
        return abs(psutil.Process(claim.pid).create_time() - claim.created) < 1.0
    except psutil.Error:
        return False


def claim(path: Path, count: int, cores: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Take ``count`` of this node's cores for the calling process, until it ends or releases.

    Cores may be claimed more than once: while a mode is switched, the old and the new shape share
    them. The least claimed ones are taken first, so replicas of one mode do not overlap.
    """
    available = cores if cores is not None else tuple(sorted(os.sched_getaffinity(0)))
    with _claims(path) as live:
        taken = Counter(core for held in live for core in held.cores)
        chosen = tuple(sorted(sorted(available, key=lambda core: (taken[core], core))[:count]))
        live.append(Claim(os.getpid(), psutil.Process().create_time(), chosen))
    return chosen


def release(path: Path) -> None:
    """Give back what the calling process claimed."""
    with _claims(path) as live:
        live[:] = [held for held in live if held.pid != os.getpid()]


def default_path() -> Path:
    """The claims file that every Tidegate process of this user on this node shares."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"tidegate-{os.getuid()}" / "cores.json"
