"""The shared metric files of a host: allocated before prometheus_client writes to them, read, and merged."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

from policy.wire.metric_definitions import MetricType

# Of the series of one model, by file: twice what a model without adapters and tenants was measured to take.
MODEL_BYTES = {
    "histogram": 256 * 1024,
    "counter": 16 * 1024,
    "gauge_livesum": 4 * 1024,
    "gauge_livemin": 4 * 1024,
    "gauge_livemax": 4 * 1024,
}
# A file doubles when it is full: what it has then is allocated, and as much again.
AHEAD = 4
# In place of the pid, in the names of the files of all processes that have ended.
ENDED = "ended"
_LOCK = "lock"
_USED = struct.Struct("=i")
# The value of a series and its time.
_VALUE_BYTES = 16


class MetricFiles:
    """The files of one process in ``directory``, of these ``kinds``.

    prometheus_client makes files of holes and maps them. On a full disk a write to a hole ends the process
    (SIGBUS), and a file that once could not grow is never written correctly again.
    """

    def __init__(self, directory: Path, pid: int, kinds: Collection[str] = tuple(MODEL_BYTES)) -> None:
        self._paths = {kind: directory / f"{kind}_{pid}.db" for kind in kinds}
        self._files: dict[str, int] = {}

    def reserve(self, models: int) -> None:
        """Allocate what the next series of ``models`` models may need; raises :class:`OSError`.

        Called before the first series of the process and before each publication.
        """
        for name, path in self._paths.items():
            if name not in self._files:
                self._files[name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode=0o600)
            file = self._files[name]
            head = os.pread(file, _USED.size, 0)
            used = _USED.unpack(head)[0] if head else 0
            wanted = 1 << max(AHEAD * used, MODEL_BYTES[name] * (1 + models)).bit_length()
            # prometheus_client cuts the file when it doubles what it has mapped.
            if os.fstat(file).st_size < wanted:
                os.posix_fallocate(file, 0, wanted)


def read_families(directory: Path, kinds: Collection[str]) -> Iterable[Metric]:
    """The families of ``kinds`` over all processes, live gauges over those that still run. Blocks."""
    with _locked(directory, fcntl.LOCK_SH):
        for path in directory.glob("gauge_live*_*.db"):
            if has_ended(path):
                path.unlink(missing_ok=True)
        files = [str(path) for kind in kinds for path in directory.glob(f"{kind}_*.db") if _is_filled(path)]
        merged: Iterable[Metric] = MultiProcessCollector.merge(files)  # type: ignore[no-untyped-call]
        return merged


def merge_ended(directory: Path) -> None:
    """Add the counts of processes that have ended to one file a kind, and remove their files. Blocks.

    Raises :class:`OSError` where there is no room: then the counts are as before.
    """
    with _locked(directory, fcntl.LOCK_EX):
        for kind in (MetricType.COUNTER, MetricType.HISTOGRAM):
            if ended := [path for path in directory.glob(f"{kind}_*.db") if has_ended(path)]:
                _merge(directory / f"{kind}_{ENDED}.db", ended)
        for path in directory.glob("exemplars_*.*"):
            if has_ended(path):
                path.unlink(missing_ok=True)


def _merge(merged: Path, ended: Iterable[Path]) -> None:
    sums: defaultdict[str, float] = defaultdict(float)
    room = mmap.PAGESIZE
    for path in filter(_is_filled, (merged, *ended)):
        end = 0
        for key, value, _, at in MmapedDict.read_all_values_from_file(path):  # type: ignore[no-untyped-call]
            sums[key] += value
            end = at + _VALUE_BYTES
        room += end
    part = merged.with_suffix(".part")
    with part.open("wb") as file:
        # As in `MetricFiles`: a write to a hole would end this process on a full disk.
        os.posix_fallocate(file.fileno(), 0, room)
    series = MmapedDict(str(part))  # type: ignore[no-untyped-call]
    for key, value in sums.items():
        series.write_value(key, value, 0.0)  # type: ignore[no-untyped-call]
    series.close()  # type: ignore[no-untyped-call]
    # Ended in between, a count would be there twice; but the processes of the host end with this one, and
    # the next start removes all files.
    part.replace(merged)
    for path in ended:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(directory: Path, how: int) -> Iterator[None]:
    """Hold the lock without which a reader would miss counts that move, or read them twice."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode=0o600)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def has_ended(path: Path) -> bool:
    """Whether the process that wrote this file has ended."""
    pid = path.stem.rpartition("_")[2]
    return pid != ENDED and not Path("/proc", pid).exists()


def _is_filled(path: Path) -> bool:
    """Whether there is something to read: a process may have ended, or the disk been full, before."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False
