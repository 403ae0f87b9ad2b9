"""Execute a program that receives SIGTERM when its parent, the supervisor, dies.

Run as a script before the program: a hook between fork and exec would run Python in a process whose other
threads are gone. Arguments: the parent's pid, then the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        # The parent died before the call.
        sys.exit(1)
    os.execvp(program[0], program)  # noqa: S606 - the supervisor's own command line


if __name__ == "__main__":
    main()
