"""Requests that were in flight when replicas died: one that kills its replica is found and refused."""

from __future__ import annotations

import math
from collections import Counter
from enum import StrEnum
from typing import Final

# A connection is lost within this time of the death of its replica, seen on another connection.
SAME_DEATH_S: Final = 5.0
# A guilty request is refused for so long after the last death, and may then run alone.
REFUSED_S: Final = 600.0
FORGOTTEN_S: Final = 3600.0
MAX_LOSSES: Final = 1024


class SuspectRestriction(StrEnum):
    """What follows for a request: nothing, no other suspect may run beside it, or it may not run."""

    NONE = "none"
    ALONE = "alone"
    GUILTY = "guilty"


# Copies of a request that are lost with one replica within this time are one loss with a count: of a thousand
# clients that send the same, each would look at those of all others.
TOGETHER_S: Final = 0.1


class RequestLoss:
    """Copies of a request that were lost with one replica at about one instant."""

    def __init__(self, replica: int, at: float) -> None:
        self.replica = replica
        self.at = at
        self.count = 1


class CrashSuspects:
    """The lost requests of the last hour by fingerprint, and the deaths of replicas. Instants are seconds.

    A request that was in flight at two deaths, alone among all that were, is guilty. Of several that were at
    the same deaths (they moved together from one replica to the next) one is to blame, or none: they run one
    at a time, so that the next death shows which. One that is served is no longer suspected. One death says
    nothing: most of what runs beside a fault is innocent. Nor does a death at about whose time another
    replica of the model died without such a request: both were lost with their node or cluster.
    """

    def __init__(self) -> None:
        # By the instant of the last loss or death, the oldest first.
        self._losses: dict[int, list[RequestLoss]] = {}
        self._served: dict[int, float] = {}
        self._deaths: dict[int, list[float]] = {}
        self._models: dict[int, str] = {}
        self._count = 0
        # What _deaths_of has found: a request that is suspected is compared with all others.
        self._found: dict[int, Counter[tuple[int, float]]] = {}

    def __len__(self) -> int:
        return len(self._losses)

    def lost(self, fingerprint: int, replica: int, at: float) -> None:
        """A request got no answer, or a broken one, from the replica with this key."""
        self._forget(at)
        self._found.pop(fingerprint, None)
        losses = self._losses.pop(fingerprint, [])
        self._losses[fingerprint] = losses
        served_at = self._served.get(fingerprint, 0.0)
        for loss in losses:
            if loss.replica == replica and loss.at >= served_at and abs(at - loss.at) <= TOGETHER_S:
                loss.count += 1
                return
        losses.append(RequestLoss(replica, at))
        self._count += 1
        while self._count > MAX_LOSSES:
            self._drop(next(iter(self._losses)))

    def died(self, model: str, replica: int, at: float) -> None:
        """The replica with this key died."""
        self._forget(at)
        self._models[replica] = model
        known = self._deaths.setdefault(replica, [])
        if not known or at - known[-1] > SAME_DEATH_S:
            known.append(at)
            self._found.clear()
            self._deaths[replica] = self._deaths.pop(replica)

    def served(self, fingerprint: int, at: float) -> None:
        """Such a request had its whole answer."""
        if fingerprint in self._losses:
            self._served[fingerprint] = at

    def excused(self, fingerprint: int, at: float) -> bool:
        """Whether such a request was lost with replicas, and something else ended all of them."""
        self._forget(at)
        own = self._deaths_of(fingerprint)
        return len(own) > 0 and not self._blamed(own)

    def suspicion(self, fingerprint: int, at: float) -> SuspectRestriction:
        """What is held against such a request at ``at``."""
        self._forget(at)
        if len(self._losses.get(fingerprint, ())) < 2:
            return SuspectRestriction.NONE
        own = self._blamed(self._deaths_of(fingerprint, self._served.get(fingerprint, 0.0)))
        if len(own) < 2:
            return SuspectRestriction.NONE
        present = 0
        for other, losses in self._losses.items():
            if len(losses) >= 2:
                theirs = self._deaths_of(other)
                present += min([theirs[death] for death in own])
        last = max(died_at for _, died_at in own)
        return (
            SuspectRestriction.GUILTY if present == 1 and at - last < REFUSED_S else SuspectRestriction.ALONE
        )

    def _deaths_of(self, fingerprint: int, since: float = 0.0) -> Counter[tuple[int, float]]:
        """The deaths (replica and instant) at which such requests were lost, and how many at each."""
        if not since and (known := self._found.get(fingerprint)) is not None:
            return known
        found: Counter[tuple[int, float]] = Counter()
        for loss in self._losses.get(fingerprint, ()):
            if loss.at < since:
                continue
            deaths = [(abs(loss.at - died_at), died_at) for died_at in self._deaths.get(loss.replica, ())]
            apart_s, died_at = min(deaths, default=(math.inf, 0.0))
            if apart_s <= SAME_DEATH_S:
                found[loss.replica, died_at] += loss.count
        if not since and fingerprint in self._losses:
            self._found[fingerprint] = found
        return found

    def _blamed(self, own: Counter[tuple[int, float]]) -> Counter[tuple[int, float]]:
        """Those of a request's ``own`` deaths at about whose time no replica of the model died without it."""
        there = {replica for replica, _ in own}
        models = {self._models[replica] for replica in there}
        others = [
            at
            for replica, deaths in self._deaths.items()
            if replica not in there and self._models[replica] in models
            for at in deaths
        ]
        blamed: Counter[tuple[int, float]] = Counter()
        for death, count in own.items():
            if min([abs(at - death[1]) for at in others], default=math.inf) > SAME_DEATH_S:
                blamed[death] = count
        return blamed

    def _drop(self, fingerprint: int) -> None:
        self._count -= len(self._losses.pop(fingerprint))
        self._served.pop(fingerprint, None)
        self._found.pop(fingerprint, None)

    def _forget(self, at: float) -> None:
        """Drop what is too old to count."""
        while self._losses:
            fingerprint = next(iter(self._losses))
            if at - self._losses[fingerprint][-1].at <= FORGOTTEN_S:
                break
            self._drop(fingerprint)
        while self._deaths:
            replica = next(iter(self._deaths))
            if at - self._deaths[replica][-1] <= FORGOTTEN_S:
                break
            del self._deaths[replica], self._models[replica]
            self._found.clear()
