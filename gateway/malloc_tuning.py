"""Settings of glibc's allocator: how much freed memory a worker keeps. Elsewhere they do nothing."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import sys

from store.event_loop.timer_coalescing import sleep_to_next

# glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# Larger blocks are mapped, as those of gateway.http.byte_accumulator: the heap gives memory back in one
# step, which takes 70 ms where many were freed.
LARGEST_ON_HEAP = 1024 * 1024 - 1

# Free memory at the end of the heap beyond which it is given back at once, and within the heap beyond which
# FreedMemory gives it back.
KEPT_BYTES = 64 * 1024 * 1024
MOST_FREE = 12 * 1024 * 1024

# How often FreedMemory looks, and at a worker that has grown: many clients may come soon after many others.
# To look takes 20 us then, and up to 2 ms where the heap is in 20,000 pieces. To give back costs page faults:
# 1 % of the time of bodies of 240 KB, and 10 % where 200 of 500 KB come at once.
LOOK_EVERY_S = 0.2
GROWN_EVERY_S = 0.1

_PAGE_BYTES = resource.getpagesize()


class _HeapUsage(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
            "keepcost",
        )
    )  # fmt: skip

    uordblks: int
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


class FreedMemory:
    """Memory that is free within the heap: one block in use at its end would keep all that is free before."""

    def __init__(self) -> None:
        # Kept open: it is needed too when clients have taken all descriptors.
        self._statm: int | None = None
        if _MALLINFO is not None:
            with contextlib.suppress(OSError):
                self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        # The least since free memory was given back, which takes no memory until it is used again.
        self._least = math.inf
        self._least_resident = math.inf
        self._has_grown = False
        self.give_back()

    async def run(self) -> None:
        """Look, and give back, until cancelled."""
        while True:
            await sleep_to_next(GROWN_EVERY_S if self._has_grown else LOOK_EVERY_S)
            self.give_back()

    def give_back(self) -> None:
        """Give it back, at 0.1 ms a megabyte, if more than :data:`MOST_FREE` was freed since the last time.

        Called often: clients that come after others find what those have freed in pieces too small for what
        they send, and their memory is added to it. A large body that is being sent counts as freed memory,
        so that this may find nothing to give back.
        """
        if _LIBC is None or _MALLINFO is None or self._statm is None:
            return
        resident = self._resident_bytes(self._statm)
        self._least_resident = min(self._least_resident, resident)
        self._has_grown = resident - self._least_resident > MOST_FREE
        # To ask the allocator takes longer, and it need not give what a worker has not grown by.
        if self._least != math.inf and not self._has_grown:
            return
        heap = _MALLINFO()
        # What is free in the heap alone would not do: a part of it was given back and is not resident.
        unused = resident - heap.uordblks
        self._least = min(self._least, unused)
        if unused - self._least > MOST_FREE and heap.fordblks > MOST_FREE:
            _LIBC.malloc_trim(0)
            self._least = self._resident_bytes(self._statm) - heap.uordblks

    @staticmethod
    def _resident_bytes(statm: int) -> int:
        return int(os.pread(statm, 100, 0).split()[1]) * _PAGE_BYTES
