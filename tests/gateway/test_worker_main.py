"""Freed memory is kept for the next body, and garbage collection is rare."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

# The page faults of a process that allocates and frees a hundred bodies in turn.
FAULTS = """
import resource
from gateway.malloc_tuning import keep_freed_memory
KEEP
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def body():
    return b"".join([b"x" * 400_000, b"y" * 400_000])
body()
before = faults()
for _ in range(100):
    body()
print(faults() - before)
"""

# The memory of a process that has freed a thousand bodies before a block that it uses, and can open no file.
KEPT = """
import resource
import psutil
from gateway.malloc_tuning import FreedMemory, keep_freed_memory
keep_freed_memory()
freed = FreedMemory()
bodies = [b"x" * size for size in range(100_000, 101_000)]
used = b"x" * 100_000
bodies.clear()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
RETURN
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(psutil.Process().memory_info().rss)
"""


def printed(program: str, mark: str, call: str) -> tuple[int, int]:
    """The numbers that processes of their own print, without and with ``call`` at the ``mark``."""
    without, with_call = (
        subprocess.run([sys.executable, "-c", program.replace(mark, at)], check=True, capture_output=True)
        for at in ("", call)
    )
    return int(without.stdout), int(with_call.stdout)


@pytest.mark.process
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc before 2.33 does not say it")
def test_freed_memory_before_used_memory_is_given_back() -> None:
    kept, returned = printed(KEPT, "RETURN", "freed.give_back()")
    assert returned < kept - 80_000_000


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_freed_memory_is_reused_for_bodies() -> None:
    usual, touched = printed(FAULTS, "KEEP", "keep_freed_memory()")
    assert touched < usual / 4


@pytest.mark.process
def test_what_the_first_request_to_the_controller_needs_is_imported_with_the_worker() -> None:
    program = "import sys, gateway.worker; print('anyio._backends._asyncio' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout == b"True\n"
