"""What a run says while it runs."""

from __future__ import annotations

import sys
import time

_BEGAN = time.monotonic()


def say(line: str) -> None:
    """One line of progress, with the seconds since the start."""
    sys.stderr.write(f"[{time.monotonic() - _BEGAN:6.0f} s] {line}\n")
    sys.stderr.flush()
