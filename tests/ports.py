"""Ports for servers that tests start."""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

# Below what kernels give to whoever asks for any port, and above what Ray gives to its workers: between
# the choice and its use nobody is given one of these.
FIRST, LAST = 20_000, 32_000


def _ports() -> Iterator[int]:
    """Those of this process of the tests: another one may choose before what this one chose is in use."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(FIRST + number, LAST, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    begin = random.randrange(len(ports))  # noqa: S311 - no secret
    return itertools.cycle([*ports[begin:], *ports[:begin]])


_candidates = _ports()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has at this instant, all different, and from one call to the next."""
    taken: list[int] = []
    with ExitStack() as stack:
        while len(taken) < count:
            port = next(_candidates)
            with suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                taken.append(port)
    return taken
