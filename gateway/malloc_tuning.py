"""Settings of glibc's allocator: how much freed memory a worker keeps. Elsewhere they do nothing."""

from __future__ import annotations

import ctypes
import sys

# glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# Larger blocks are mapped, as those of gateway.http.byte_accumulator: the heap gives memory back in one
# step, which takes 70 ms where many were freed.
LARGEST_ON_HEAP = 1024 * 1024 - 1

# Free memory at the end of the heap beyond which it is given back at once, and within the heap beyond which
# return_freed_memory() does.
KEPT_BYTES = 64 * 1024 * 1024
MOST_FREE = 12 * 1024 * 1024


class _HeapUsage(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    )  # fmt: skip

    fordblks: int


_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
_MALLOPT = getattr(_LIBC, "mallopt", None)
# glibc has it since 2.33.
_MALLINFO = getattr(_LIBC, "mallinfo2", None)
if _MALLINFO is not None:
    _MALLINFO.restype = _HeapUsage


def keep_freed_memory() -> None:
    """Allocate bodies from the heap, and give it back only beyond :data:`KEPT_BYTES`.

    By default glibc maps blocks of 128 KiB anew: to copy 240 KB takes 430 us for page faults, not 25.
    """
    if _MALLOPT is not None:
        _MALLOPT(_MMAP_THRESHOLD, LARGEST_ON_HEAP)
        _MALLOPT(_TRIM_THRESHOLD, KEPT_BYTES)


def return_freed_memory() -> None:
    """Give back what is free within the heap if it is more than :data:`MOST_FREE`, at 0.1 ms a megabyte.

    One block in use at the end of the heap would keep all that is free before it.
    """
    if _LIBC is not None and _MALLINFO is not None and _MALLINFO().fordblks > MOST_FREE:
        _LIBC.malloc_trim(0)
