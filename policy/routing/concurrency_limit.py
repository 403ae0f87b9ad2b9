"""The most requests in flight that keep a server full and its own queue short, learned from its queue.

The queue is in the server's metrics. Without them it is estimated: streams that wait for their first byte,
less those whose prompts are being computed, which are by Little's law (as in TCP Vegas) the first bytes per
second times their least delay. A standing queue would raise the least delay itself, so that the limit is
lowered for a moment once a minute, and the least delay is taken anew. Answers that are no streams show no
first byte: the delay is what of their durations does not grow with their tokens (a line is fitted).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
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
# Whole answers to which a line is fitted: so many, not older than this, whose lengths differ by at least this
# share of the mean (their standard deviation).
FITTED: Final = 128
LEAST_FITTED: Final = 32
FITTED_S: Final = 300.0
LEAST_SPREAD: Final = 0.15
# Their delay may be overestimated by so many standard errors.
ERRORS: Final = 1.5
# A share of the requests, and of the delay, that counts as fewer.
FEWER: Final = 0.9
# By whole answers the least delay is taken anew so often, with a lower limit for at most this time.
WHOLE_PROBE_EVERY_S: Final = 300.0
WHOLE_PROBE_S: Final = 60.0
# Every this many seconds of the clock, which is the same for all gateways, the limit is lowered to this share
# for at most this time.
PROBE_EVERY_S: Final = 60.0
PROBE_SHARE: Final = 0.8
PROBE_S: Final = 5.0


class ServerQueue(NamedTuple):
    """The requests of all clients of a server, as it reports them."""

    running: float
    waiting: float


class WholeAnswer(NamedTuple):
    """An answer that is no stream, with ``tokens``, came ``duration_s`` after its request."""

    duration_s: float
    tokens: float
    at: float


class ConcurrencyLimit:
    """The limit of one server; ``at`` are seconds since the epoch, so that gateways probe together."""

    def __init__(self, at: float) -> None:
        self._limit = float(INITIAL)
        self._at = at
        self._waiting = 0.0
        self._least_s = math.inf
        self._firsts: deque[float] = deque(maxlen=RATE_OF)
        self._whole: deque[WholeAnswer] = deque(maxlen=FITTED)
        self._changed_at, self._probed_at = at, at
        # The delay and the requests in flight when the limit was lowered by whole answers.
        self._lowered = (0.0, 0)
        self._probes_until = 0.0
        self._probes_whole = False

    @property
    def limit(self) -> int:
        return max(1, math.floor(self._limit * (PROBE_SHARE if self._probes_until else 1.0)))

    def first(self, delay_s: float, at: float) -> None:
        """The first byte of a stream came, ``delay_s`` after its request."""
        self._least_s = min(self._least_s, delay_s)
        self._firsts.append(at)

    def whole(self, answer: WholeAnswer) -> None:
        """An answer that is no stream came; without tokens it tells nothing."""
        if answer.tokens > 0:
            self._whole.append(answer)

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
        if self._probes_whole:
            self._probes_whole, self._probes_until = False, 0.0
        if self._probes_until:
            if in_flight > self.limit and at < self._probes_until:
                return
            if in_flight <= self.limit:
                self._least_s = math.inf  # requests that are sent now meet no queue
            self._probes_until = 0.0
        elif at // PROBE_EVERY_S > self._at // PROBE_EVERY_S and at - self._at < MAX_ELAPSED_S:
            self._probes_until, self._at = at + PROBE_S, at
            return
        if self._least_s == math.inf or not streams or not self._firsts:
            self._at = at
            return
        rate = len(self._firsts) / max(at - self._firsts[0], 1e-3)
        self._estimate(unanswered, rate, streams, in_flight, at)

    def estimate_whole(self, mine: int, in_flight: int, at: float) -> None:
        """As :meth:`estimate`, where most of this worker's requests (``mine``) are no streams.

        What they show comes late: only those count that were sent since the limit changed.
        """
        while self._whole and at - self._whole[0].at > FITTED_S:
            self._whole.popleft()
        if self._probes_until and not self._probes_whole:  # by streams, of which there were more
            self._probes_until, self._changed_at = 0.0, at
        if at // WHOLE_PROBE_EVERY_S > self._probed_at // WHOLE_PROBE_EVERY_S:
            self._probed_at = at
            if self._whole:
                self._probes_whole, self._probes_until, self._changed_at = True, at + WHOLE_PROBE_S, at
        seen = [each for each in self._whole if each.at - each.duration_s >= self._changed_at]
        fitted = _fit(seen)
        if self._probes_whole and (len(seen) >= LEAST_FITTED or at >= self._probes_until):
            self._probes_whole, self._probes_until, self._changed_at = False, 0.0, at
            if fitted is not None:
                self._least_s = fitted[0]
            return
        if self._probes_whole or fitted is None or not mine:
            return
        delay_s, error_s = fitted
        before = self.limit
        lowered_s, lowered_from = self._lowered
        are_fewer = in_flight < FEWER * lowered_from
        if are_fewer and delay_s > FEWER * lowered_s:
            # Fewer requests wait as long: it is no queue. Prompts became longer, or the server slower.
            self._least_s, self._limit = delay_s, max(self._limit, float(lowered_from))
        else:
            self._least_s = min(self._least_s, delay_s)
            rate = len(self._whole) / max(at - self._whole[0].at, 1e-3)
            # By Little's law so many have no token yet.
            unanswered = rate * max(0.0, delay_s - ERRORS * error_s)
            self._at = self._changed_at
            self._estimate(unanswered, rate, mine, in_flight, at)
        if self.limit != before:
            self._changed_at = at
            if self.limit > before:
                self._lowered = (0.0, 0)
            elif are_fewer or not lowered_from:
                self._lowered = (delay_s, in_flight)

    def _estimate(self, unanswered: float, rate: float, requests: int, in_flight: int, at: float) -> None:
        """``unanswered`` of ``requests`` have no token yet; ``rate`` of them get their first in a second."""
        prefilling = min(rate * TOLERANCE * self._least_s, MOST_PREFILLING * requests)
        waiting = math.floor(max(0.0, unanswered - prefilling) * in_flight / requests)
        self.follow(ServerQueue(float(in_flight - waiting), float(waiting)), in_flight, at)
        self._limit = max(self._limit, float(LEAST_BY_DELAYS))


def _fit(answers: Sequence[WholeAnswer]) -> tuple[float, float] | None:
    """The mean delay of the first token of ``answers``, where the line through them meets no tokens.

    With its standard error; ``None`` if they are too few or too alike for a line.
    """
    count = len(answers)
    if count < LEAST_FITTED:
        return None
    tokens = sum([each.tokens for each in answers]) / count
    duration_s = sum([each.duration_s for each in answers]) / count
    spread = sum([(each.tokens - tokens) ** 2 for each in answers])
    if math.sqrt(spread / count) < LEAST_SPREAD * tokens:
        return None
    slope = sum([(each.tokens - tokens) * (each.duration_s - duration_s) for each in answers]) / spread
    delay_s = duration_s - slope * tokens
    squares = sum([(each.duration_s - delay_s - slope * each.tokens) ** 2 for each in answers])
    error_s = math.sqrt(squares / (count - 2) * (1.0 / count + tokens**2 / spread))
    return max(0.0, delay_s), error_s
