"""How this process asks the system for memory, and how often it looks for garbage."""

from __future__ import annotations

import ctypes
import gc
import sys

# glibc's names for what mallopt sets.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
# The largest that glibc takes for what is still allocated from the heap.
LARGEST_ON_HEAP = 32 * 1024 * 1024
KEPT_BYTES = 64 * 1024 * 1024
# Objects made and not freed until the collector looks for cycles among them.
YOUNGEST = 10_000


def keep_freed_memory() -> None:
    """Allocate bodies from the heap, and give it back only beyond :data:`KEPT_BYTES`.

    By default glibc maps each block of 128 KiB anew and returns it when it is freed: to copy 240 KB then
    costs 430 us, most of it page faults, where it costs 25 us in memory that is kept. Other C libraries
    have no such setting, and are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_ON_HEAP)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def collect_seldom() -> None:
    """Leave what was made at the start out of collections, and collect after :data:`YOUNGEST` objects.

    A call frees all it made by reference counts, so a collection finds nothing. By default there is one
    every 700 objects, which is every few calls, and it costs a sixth of their time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST)
