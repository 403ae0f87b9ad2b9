"""The most requests in flight that keep a server full and its own queue short, learned from its queue.

The queue is in the server's metrics. Without them it is estimated: streams that wait for their first byte,
less those whose prompts are being computed, which are by Little's law (as in TCP Vegas) the first bytes per
second times their least delay. A standing queue would raise the least delay itself, so that the limit is
lowered for a moment once a minute, and the least delay is taken anew.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

INITIAL: Final = 256
# A limit by delays is not below this: they tell a short queue from slow requests only roughly.
LEAST_BY_DELAYS: Final = 4
# The part of the running requests that may wait at the server, so that no slot of it is free; at least one.
SPARE: Final = 0.05
# The limit decreases by at most this factor a second, and increases by at most this share a reading.
SHRINK: Final = 0.7
GROWTH: Final = 0.2
# Longer without a reading, nothing ran there: the time does not count.
MAX_ELAPSED_S: Final = 5.0
# A prompt may take this multiple of the least delay, and at most this share of the streams compute theirs.
TOLERANCE: Final = 1.5
MOST_PREFILLING: Final = 0.5
# First bytes whose rate is taken.
RATE_OF: Final = 32
# Every this many seconds of the clock, which is the same for all gateways, the limit is lowered to this share
# for at most this time.
PROBE_EVERY_S: Final = 60.0
PROBE_SHARE: Final = 0.8
PROBE_S: Final = 5.0


class ServerQueue(NamedTuple):
    """The requests of all clients of a server, as it reports them."""

    running: float
    waiting: float


class ConcurrencyLimit:
    """The limit of one server; ``at`` are seconds since the epoch, so that gateways probe together."""

    def __init__(self, at: float) -> None:
        self._limit = float(INITIAL)
        self._at = at
        self._waiting = 0.0
        self._least_s = math.inf
        self._firsts: deque[float] = deque(maxlen=RATE_OF)
        self._probes_until = 0.0

    @property
    def limit(self) -> int:
        return max(1, math.floor(self._limit * (PROBE_SHARE if self._probes_until else 1.0)))

    def first(self, delay_s: float, at: float) -> None:
        """The first byte of a stream came, ``delay_s`` after its request."""
        self._least_s = min(self._least_s, delay_s)
        self._firsts.append(at)

    def follow(self, queue: ServerQueue, in_flight: int, at: float) -> None:
        """Lower the limit by this host's share of what waits too much, or raise it while nothing waits.

        ``in_flight`` are the requests of this host.
        """
        elapsed_s, self._at = min(max(0.0, at - self._at), MAX_ELAPSED_S), at
        self._probes_until = 0.0
        lasting, most = min(self._waiting, queue.waiting), max(self._waiting, queue.waiting)
        self._waiting = queue.waiting
        excess = lasting - max(1.0, SPARE * queue.running)
        if excess > 0.0:
            share = min(1.0, in_flight / (queue.running + queue.waiting))
            wanted = max(in_flight - excess * share, 1.0)
            self._limit = min(self._limit, max(wanted, self._limit * SHRINK**elapsed_s))
        elif most == 0.0 and in_flight >= 0.9 * self.limit:
            self._limit += max(1.0, self._limit * GROWTH)

    def estimate(self, unanswered: int, streams: int, in_flight: int, at: float) -> None:
        """As :meth:`follow`, without the server's report.

        ``unanswered`` of this worker's ``streams`` wait for their first byte.
        """
        if self._probes_until:
            if in_flight > self.limit and at < self._probes_until:
                return
            if in_flight <= self.limit:
                self._least_s = math.inf  # requests that are sent now meet no queue
            self._probes_until = 0.0
        elif at // PROBE_EVERY_S > self._at // PROBE_EVERY_S and at - self._at < MAX_ELAPSED_S:
            self._probes_until, self._at = at + PROBE_S, at
            return
        if self._least_s == math.inf or not streams:
            self._at = at
            return
        rate = len(self._firsts) / max(at - self._firsts[0], 1e-3)
        prefilling = min(rate * TOLERANCE * self._least_s, MOST_PREFILLING * streams)
        waiting = math.floor(max(0.0, unanswered - prefilling) * in_flight / streams)
        self.follow(ServerQueue(float(in_flight - waiting), float(waiting)), in_flight, at)
        self._limit = max(self._limit, float(LEAST_BY_DELAYS))
