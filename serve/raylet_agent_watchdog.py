"""Keep an agent of the raylet running: the raylet starts ``python serve/raylet_agent_watchdog.py COMMAND``.

The raylet ends the node when a process that it started as an agent ends. This one starts the agent again, and
both end with the raylet. It is started for each node, so it imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
PAUSE_S = 0.5


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    """Run the agent for as long as the raylet lives."""
    raylet = int(os.environ["RAY_RAYLET_PID"])
    _end_with_parent()
    while os.getppid() == raylet:
        # Without threads in this process Python may run between fork and exec.
        subprocess.run(sys.argv[1:], preexec_fn=_end_with_parent, check=False)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
