"""Ports for servers that tests start."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

# Below what kernels give to whoever asks for any port, and above what Ray gives to its workers: between
# the choice and its use nobody is given one of these.
FIRST, LAST = 20_000, 32_000


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has at this instant, all different."""
    taken: list[int] = []
    with ExitStack() as stack:
        while len(taken) < count:
            port = random.randrange(FIRST, LAST)  # noqa: S311 - no secret
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                taken.append(port)
    return taken
