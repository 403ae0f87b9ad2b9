"""A model's queue in one worker with the places in it, and what its counters hear of other workers."""

from __future__ import annotations

import asyncio
import math
from collections import Counter as Counts
from collections.abc import Iterator
from itertools import islice

from gateway.routing.fleet import ServedModel
from gateway.routing.replica import ReplicaHandle, UnseenPrefill
from gateway.routing.shared_memory import SharedCounts
from policy.admission.fairness import has_fair_share
from policy.admission.queue import Admitted, Queue, Waiting
from policy.admission.reserved_slots import ReservedSlots
from policy.hashing import hash_name
from policy.request import Request
from policy.routing.router import CostEstimate

# A slot that is left to others is theirs for so long: they look for one every 20 ms.
LEFT_S = 0.1
LEFT_EVERY_S = 1.0
# How far down the order a slot that is kept free is offered.
MOST_WALKED = 512


class Ticket:
    """A request's place in the queue of its model.

    ``entered`` once it was found to fit: what is sent back later is not asked again. ``quote`` is what
    was predicted for the replica that it was sent to last, ``pending`` its uncached prompt tokens there
    until its first token (``ahead`` where that will not be seen), ``news`` the hashes that were new
    there; ``foreseen_s`` how long it was to wait.
    """

    __slots__ = (
        "ahead", "began", "entered", "foreseen_s", "granted", "line", "news", "pending", "quote",
        "request", "served",
    )  # fmt: skip

    def __init__(self, served: ServedModel, request: Request, line: ModelQueue) -> None:
        self.served = served
        self.request = request
        self.line = line
        self.entered = False
        self.quote: CostEstimate | None = None
        self.pending = 0
        self.ahead: UnseenPrefill | None = None
        self.news: tuple[int, ...] = ()
        self.foreseen_s: float | None = None
        self.granted: asyncio.Future[ReplicaHandle] | None = None
        self.began: Admitted | None = None


class ModelQueue:
    """A model's queue in this worker, and what wakes it. ``runs`` are the adapters at work by replica.

    ``shared`` is what the workers of this host tell each other.
    """

    __slots__ = (
        "_begun", "_key", "_left_at", "_shared", "places", "pump", "queue", "reserve", "rested_at", "runs",
        "served", "timer",
    )  # fmt: skip

    def __init__(
        self, served: ServedModel, queue: Queue, reserve: ReservedSlots, shared: SharedCounts
    ) -> None:
        self._shared = shared
        self._key = hash_name(f"waits for {served.name}")
        self._left_at = -math.inf
        self._begun = -1
        self.served = served
        self.queue = queue
        self.reserve = reserve
        self.places: dict[int, Ticket] = {}
        self.runs: dict[str, Counts[str]] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.pump: asyncio.Handle | None = None
        self.rested_at = 0.0

    @property
    def up(self) -> bool:
        """Whether any replica would serve, had it room."""
        return any(link.admissible or link.full for link in self.served.links)

    @property
    def oldest(self) -> float | None:
        """When the one came that waits the longest."""
        return min((request.arrived for request in self.queue.waiting.values()), default=None)

    @property
    def has_room(self) -> bool:
        """Whether any replica takes one more by its bound."""
        return any(
            link.admissible and (not link.bound or link.in_flight < link.bound) for link in self.served.links
        )

    def waits(self, place: Ticket) -> None:
        """``place`` waits here, which the other workers of this host are told."""
        self.places[place.request.ticket] = place
        self._shared.begin(self._key, 0)

    def waits_no_more(self, place: Ticket) -> None:
        """Whether or not it did."""
        if self.places.pop(place.request.ticket, None) is not None:
            self._shared.end(self._key)

    def is_theirs(self, at: float) -> bool:
        """Whether the next slot is left to those who wait in other workers of this host.

        Not for long, nor again soon: they may have no use for it.
        """
        if self._shared.alone or not (theirs := self._shared.others(self._key)[0]):
            return False
        running = sum([link.mine for link in self.served.links])
        elsewhere, begun = self._elsewhere()
        if not has_fair_share(running, len(self.queue), elsewhere, theirs, was_last=begun == self._begun):
            return False
        if at - self._left_at > LEFT_EVERY_S:
            self._left_at = at
        return at - self._left_at < LEFT_S

    def took(self) -> None:
        """A slot was taken here, which only matters where somebody else waits for one."""
        if not self._shared.alone and self._shared.others(self._key)[0]:
            self._begun = self._elsewhere()[1]

    def _elsewhere(self) -> tuple[int, int]:
        """How many requests run that other workers of this host sent, and how many they ever sent."""
        counts = [self._shared.others(link.view.key) for link in self.served.links]
        return sum([count[0] for count in counts]), sum([count[2] for count in counts])

    def joins(self, adapter: str, link: ReplicaHandle) -> None:
        """A request for ``adapter`` runs on ``link``."""
        self.runs.setdefault(link.id, Counts())[adapter] += 1

    def leaves(self, adapter: str, link: ReplicaHandle) -> None:
        """It runs there no more."""
        running = self.runs[link.id]
        running[adapter] -= 1
        if not running[adapter]:
            del running[adapter]
        if not running:
            del self.runs[link.id]

    def kept_from(self, tenant: str) -> int:
        """How many slots of each replica the tenant leaves to others; -1 if it gets none at present."""
        if not self.reserve.contended:
            return 0
        free = links = 0
        for link in self.served.links:
            if link.admissible:
                if not link.bound:
                    return 0
                links += 1
                free += max(0, link.bound - link.in_flight)
        return self.reserve.kept_from(tenant, free, links)

    def keeps_for(self, tenant: str) -> bool:
        """Whether a slot is free that was kept for such as ``tenant``, whoever else waits."""
        return self.reserve.contended and self.has_room and self.kept_from(tenant) == 0

    def granted(self) -> Iterator[Waiting]:
        """Those that wait, in order, without the tenants that have to leave the last slots to others."""
        denied: set[str] = set()
        for turn in islice(self.queue.walk(), MOST_WALKED):
            tenant = turn.request.tenant
            if tenant not in denied:
                if self.kept_from(tenant) >= 0:
                    yield turn
                else:  # what is handed out leaves less room, never more
                    denied.add(tenant)


class QueuePort:
    """The workers of this host as the counters of one model see them."""

    def __init__(self, shared: SharedCounts, model: str) -> None:
        self._shared = shared
        self._model = model
        self._keys: dict[str, int] = {}

    def served(self, tenant: str, tokens: int) -> None:
        self._shared.served(self._keys.get(tenant) or self._key(tenant), tokens)

    def others(self, tenant: str) -> int:
        if self._shared.alone:
            return 0
        return self._shared.served_by_others(self._keys.get(tenant) or self._key(tenant))

    def _key(self, tenant: str) -> int:
        key = self._keys[tenant] = hash_name(f"{self._model} {tenant}")
        return key
