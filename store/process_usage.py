"""What this process uses of its machine: processor time, memory and file descriptors."""

from __future__ import annotations

import resource
from typing import NamedTuple

import psutil


class ProcessUsage(NamedTuple):
    """Seconds of all processors since the start, bytes of memory, descriptors, and the start in Unix time."""

    cpu_s: float
    resident_bytes: int
    open_fds: int
    max_fds: int
    started_at: float


def read_usage() -> ProcessUsage:
    """The usage of this process now; thousands of descriptors take milliseconds."""
    process = psutil.Process()
    with process.oneshot():
        times = process.cpu_times()
        return ProcessUsage(
            times.user + times.system,
            process.memory_info().rss,
            process.num_fds(),
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            process.create_time(),
        )
