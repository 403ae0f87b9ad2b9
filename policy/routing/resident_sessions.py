"""The sessions in one replica's KV cache, as an engine that evicts the least recently used holds them."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import islice
from typing import Final

from policy.routing.session_return import SessionReturns

# The most sessions of a replica, and of the next to be evicted, that are considered.
MOST: Final = 4096
VICTIMS: Final = 4
# Requests between two prices of those, if none is evicted.
EVERY: Final = 8


class ResidentSession:
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
    """The residents of one replica, the least recent first, and the sum of their ``own`` tokens.

    ``room`` is the number of further tokens that fit. Beyond, each token evicts one that is computed a second
    time with the probability ``chance``.
    """

    def __init__(self) -> None:
        self.room = math.inf
        self.chance = 0.0
        self.by_session: OrderedDict[int, ResidentSession] = OrderedDict()
        self.own = 0
        self._uses = 0

    def use(self, session: int, turns: int, tokens: int, shared: int, at: float) -> None:
        """A prompt of ``tokens`` was sent there; ``shared`` of them are of others too, if it is new there."""
        found = self.by_session.get(session)
        if found is None:
            found = self.by_session[session] = ResidentSession(shared)
        else:
            self.by_session.move_to_end(session)
        own = max(tokens - found.shared, 0)
        self.own += own - found.own
        found.own, found.tokens, found.turns, found.at, found.away = own, tokens, turns, at, False

    def leave(self, session: int) -> None:
        """It went on elsewhere, and will not come back for what is here."""
        if (found := self.by_session.get(session)) is not None:
            found.away = True

    def settle(self, capacity: float, at: float, returns: SessionReturns) -> None:
        """Remove the least recent that do not fit in ``capacity`` tokens, and price those that are next.

        They would otherwise stay for about as long again as they have been there since their last request.
        """
        sessions, own = self.by_session, self.own
        while len(sessions) > 1 and (self.own > capacity or len(sessions) > MOST):
            self.own -= sessions.popitem(last=False)[1].own
        self.room = capacity - self.own
        self._uses += 1
        if self.own == own and self._uses % EVERY:
            return
        tokens, lost = 1.0, 0.0
        for resident in islice(sessions.values(), VICTIMS):
            tokens += resident.own
            if not resident.away:
                lost += resident.own * returns.soon(resident.turns, at - resident.at)
        self.chance = lost / tokens
