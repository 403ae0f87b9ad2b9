"""Freed memory is kept for the next body, and garbage collection is rare."""

from __future__ import annotations

import subprocess
import sys

import pytest

# The page faults of a process that allocates and frees a hundred bodies in turn.
FAULTS = """
import resource
from gateway.process_memory import keep_freed_memory
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

# The memory of a process that has freed a thousand bodies before a block that it uses.
KEPT = """
import psutil
from gateway.process_memory import keep_freed_memory, return_freed_memory
keep_freed_memory()
bodies = [b"x" * size for size in range(100_000, 101_000)]
used = b"x" * 100_000
bodies.clear()
RETURN
print(psutil.Process().memory_info().rss)
"""


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_freed_memory_before_used_memory_is_given_back() -> None:
    def resident(give_back: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", KEPT.replace("RETURN", give_back)], check=True, capture_output=True
        )
        return int(ran.stdout)

    assert resident("return_freed_memory()") < resident("") - 80_000_000


@pytest.mark.process
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_freed_memory_is_reused_for_bodies() -> None:
    def touched(keep: str) -> int:
        ran = subprocess.run(
            [sys.executable, "-c", FAULTS.replace("KEEP", keep)], check=True, capture_output=True
        )
        return int(ran.stdout)

    assert touched("keep_freed_memory()") < touched("") / 4
