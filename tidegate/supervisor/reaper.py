"""Processes whose parent died: they come to the supervisor, so that none is lost from sight."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Container

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have daemons that detach from the Ray head stay descendants of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def collect_orphans(started: Container[int]) -> None:
    """Collect those that have ended, but none that was ``started``: whoever started it waits for it."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in started:
                return
            os.waitpid(found.si_pid, os.WNOHANG)
