"""Sharing of the replicas' slots between the workers of a host: which one leaves the next to another."""

from __future__ import annotations

import math
from typing import Final

from policy.admission.wait_prediction import RANK
from policy.routing.cost import Candidate
from policy.types import Priority

# How long a slot is left to other workers, which look for one every 20 ms.
LEFT_S: Final = 0.06
# How long a replica whose slot they did not want is not left to them again.
UNWANTED_S: Final = 1.0
# The number of ranks of waiting requests in all workers: each gets slots before those of higher numbers.
RANKS = 2 * len(RANK)


def rank_of(priority: Priority, *, owed: bool) -> int:
    """By priority, and within a priority those first whose tenants have credit (``owed``)."""
    return 2 * RANK[priority] + (0 if owed else 1)


def has_fair_share(
    running: int, waiting: int, theirs_running: int, theirs_waiting: int, *, was_last: bool = False
) -> bool:
    """Whether a worker leaves the next slot to requests of the same rank in other workers of its host.

    Slots are shared by all requests, whichever worker they came to; but the worker that frees one is the
    first to know, and with few slots would keep them all. ``was_last`` is whether it took the last slot,
    which decides where no request of the others runs.
    """
    if not theirs_waiting:
        return False
    if not theirs_running:
        return running > 0 or was_last
    if not running:
        return False
    mine, theirs = running + waiting, theirs_running + theirs_waiting
    # Rounded up: of many workers with a share of 1.1 slots each none would take its second.
    return running + 1 > math.ceil((running + theirs_running + 1) * mine / (mine + theirs))


class _YieldedSlot:
    """A slot that is left: ``since`` when, last looked at ``seen``, and the requests begun there by then.

    ``higher``: the requests of a higher priority that had waited in other workers by then.
    """

    __slots__ = ("begun", "higher", "seen", "since", "theirs", "unwanted_until")

    def __init__(self, begun: int, theirs: int, higher: int, at: float) -> None:
        self.begun = begun
        self.theirs = theirs
        self.higher = higher
        self.since = self.seen = at
        self.unwanted_until = -math.inf


class YieldedSlots:
    """The slots that a worker leaves to requests of others that come first, by replica.

    Those requests may be unable to use it, or their worker may hang: what is left and not taken for
    :data:`LEFT_S` is taken, and the replica is not left for :data:`UNWANTED_S` unless the others use it, or
    get a request of a higher priority.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _YieldedSlot] = {}

    def leaves(self, candidate: Candidate, theirs: int, higher: int, at: float) -> bool:
        """Whether a free slot is left.

        ``theirs`` are the requests that the others ever began there, ``higher`` those of a higher priority
        that ever waited in other workers.
        """
        left = self._replicas.get(candidate.id)
        if left is not None and at < left.unwanted_until:
            if (theirs, higher) == (left.theirs, left.higher):
                return False
            left = None
        if left is None or candidate.begun != left.begun or at > left.seen + LEFT_S:
            self._replicas[candidate.id] = _YieldedSlot(candidate.begun, theirs, higher, at)
            return True
        left.seen = at
        if at < left.since + LEFT_S:
            return True
        left.unwanted_until = at + UNWANTED_S
        return False
