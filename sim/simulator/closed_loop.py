"""The closed loop: requests that are sent only after an earlier one of a session has ended."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from itertools import count

from sim.arrivals import Arrival


class _Session:
    """A session: ends that no request has followed yet, the last of them, and the requests that wait."""

    __slots__ = ("ended_at", "ends", "followers")

    def __init__(self) -> None:
        self.ends = 0
        self.ended_at = 0.0
        self.followers: deque[Arrival] = deque()


class ClosedLoop:
    """The requests of a trace at the instants at which they are sent, in seconds of the run.

    Those of an open loop are sent at their ``at``. So are followers of a session of which the trace had no
    request, as in a slice. The trace is read no further than a run has come.
    """

    def __init__(self, trace: Iterator[Arrival]) -> None:
        self._trace = trace
        self._upcoming = next(trace, None)
        self._sessions: dict[int, _Session] = {}
        self._order = count()
        self._due: list[tuple[float, int, Arrival]] = []

    def next_at(self, until: float) -> float:
        """When the next request is sent, if not after ``until``; later or ``inf`` otherwise."""
        due = self._due
        while (upcoming := self._upcoming) is not None:
            if upcoming.at > until or (due and due[0][0] < upcoming.at):
                break
            if (sent_at := self._read(upcoming)) is not None:
                heapq.heappush(due, (sent_at, next(self._order), upcoming))
            self._upcoming = next(self._trace, None)
        return due[0][0] if due else math.inf

    def pop(self) -> Arrival:
        """The request that is sent next."""
        return heapq.heappop(self._due)[2]

    @property
    def over(self) -> bool:
        """Whether no request will be sent, except those that follow one that has not ended."""
        return self._upcoming is None and not self._due

    def ended(self, session: int, at: float) -> None:
        """A request of ``session`` has ended: the first that follows is sent ``think_s`` seconds after it."""
        found = self._sessions.get(session)
        if found is None:
            return
        if found.followers:
            follower = found.followers.popleft()
            heapq.heappush(self._due, (at + follower.think_s, next(self._order), follower))
        else:
            found.ends += 1
            found.ended_at = at

    def _read(self, arrival: Arrival) -> float | None:
        """When the request is sent; ``None`` if the one that it follows has not ended."""
        sessions = self._sessions
        sent_at: float | None = arrival.at
        if arrival.follows and (found := sessions.get(arrival.follows)) is not None:
            if found.ends:
                found.ends -= 1
                sent_at = max(arrival.at, found.ended_at + arrival.think_s)
            else:
                found.followers.append(arrival)
                sent_at = None
        if arrival.session and arrival.session not in sessions:
            sessions[arrival.session] = _Session()
        return sent_at
