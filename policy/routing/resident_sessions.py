"""The sessions in one replica's KV cache, as an engine that evicts the least recently used holds them."""

from __future__ import annotations

import math
from collections import OrderedDict

from policy.routing.session_return import SessionReturns

# The most sessions of a replica, and of the next to be evicted, that are considered.
MOST = 4096
VICTIMS = 8


class Resident:
    """What a session has there: ``tokens`` of its last prompt, of which others have the first ``shared`` too.

    ``at`` is its last request there, its ``turns``-th; ``away`` once it went on elsewhere.
    """

    __slots__ = ("at", "away", "own", "shared", "tokens", "turns")

    def __init__(self, shared: int) -> None:
        self.at = 0.0
        self.away = False
        self.shared = shared
        self.own = self.tokens = self.turns = 0


class ResidentSessions:
    """The residents of one replica, the least recent first, and the sum of their ``own`` tokens."""

    def __init__(self) -> None:
        self.by_session: OrderedDict[int, Resident] = OrderedDict()
        self.own = 0

    def use(self, session: int, turns: int, tokens: int, shared: int, at: float) -> None:
        """A prompt of ``tokens`` was sent there; ``shared`` of them are of others too, if it is new there."""
        found = self.by_session.get(session)
        if found is None:
            found = self.by_session[session] = Resident(shared)
        else:
            self.by_session.move_to_end(session)
        own = max(tokens - found.shared, 0)
        self.own += own - found.own
        found.own, found.tokens, found.turns, found.at, found.away = own, tokens, turns, at, False

    def leave(self, session: int) -> None:
        """It went on elsewhere, and will not come back for what is here."""
        if (found := self.by_session.get(session)) is not None:
            found.away = True

    def evict(self, capacity: float) -> None:
        """Remove the least recent, as far as they do not fit in ``capacity`` tokens beside the last."""
        sessions = self.by_session
        while len(sessions) > 1 and (self.own > capacity or len(sessions) > MOST):
            self.own -= sessions.popitem(last=False)[1].own

    def loss(self, tokens: float, capacity: float, at: float, returns: SessionReturns) -> float:
        """The expected tokens that are computed twice since ``tokens`` more are sent there.

        They evict the least recently used, which would otherwise have stayed for about as long again.
        """
        over = self.own + tokens - capacity
        if over <= 0.0 or capacity == math.inf:
            return 0.0
        lost = 0.0
        for looked, resident in enumerate(self.by_session.values(), 1):
            part = min(over, resident.own)
            if not resident.away:
                lost += part * returns.soon(resident.turns, at - resident.at)
            over -= part
            if over <= 0.0 or looked == VICTIMS:
                break
        return lost
