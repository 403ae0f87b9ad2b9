"""Become another program that is told to end when the supervisor dies, however it dies.

Run as a script, before the program's own interpreter starts: a hook between fork and exec would
run Python in a process whose other threads are gone. Arguments: the parent's pid, then the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process's life to its parent's, then exec."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        # It died before the line was tied.
        sys.exit(1)
    os.execvp(program[0], program)  # noqa: S606 - the supervisor's own command line


if __name__ == "__main__":
    main()
