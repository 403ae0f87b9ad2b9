"""Fairness: tenants share a model by their weights in tokens, and adapters share within a tenant.

:class:`Discipline` is the port for another order of service (docs/extending.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple, Protocol, TypeVar

from policy.admission.ordered_set import OrderedSet
from policy.admission.virtual_counters import VirtualCounter, VirtualCounters
from policy.request import Request

# Idle tenants beyond these are forgotten; the adapters of each tenant are bounded separately.
MOST_TENANTS = 4096
MOST_ADAPTERS = 256
# A tenant is active for this long after its last request.
ACTIVE_S = 10.0
# One slot is reserved, and one more per this many. With one alone, the second of two simultaneous requests
# (11 % at two per second) waited 57 ms on average on eight slots of 0.4 s.
ONE_IN = 16

Charge = TypeVar("Charge")
F = TypeVar("F", bound=VirtualCounter)


class QueueOrder(NamedTuple):
    """A request and its virtual start ``tag`` in weighted tokens; requests are served in order of tags."""

    request: Request
    tag: float


class Discipline(Protocol[Charge]):
    """The order among the requests of one priority. ``tokens`` is the expected cost of those that wait.

    ``Charge`` is an opaque receipt for what was charged.
    """

    tokens: int

    def __len__(self) -> int:
        """How many requests wait."""

    def add(self, request: Request, *, returned: bool) -> None:
        """Queue it; ``returned`` if a replica sent it back, which protects it from :meth:`victim`."""

    def remove(self, request: Request) -> None:
        """Take it out of the queue."""

    def walk(self) -> Iterator[QueueOrder]:
        """All waiting requests in the order of service; the queue must not change meanwhile."""

    def charge(self, request: Request) -> Charge:
        """Charge a request that begins; one that waited was removed before."""

    def settle(self, charge: Charge, tokens: int) -> None:
        """Correct the charge to ``tokens``; 0 takes it back. May be called again."""

    def ended(self, charge: Charge) -> None:
        """The request no longer runs; called once."""

    def ahead(self, newcomer: Request) -> float:
        """About how many tokens of this priority would be served before ``newcomer``."""

    def count_peers(self) -> None:
        """Charge what other workers served, if the discipline shares them; called regularly."""

    def victim(self, newcomer: Request | None) -> Request | None:
        """The request that makes room for ``newcomer`` of this priority, or of a higher one (``None``)."""


class Peers(Protocol):
    """The tokens that the workers of this host charge: each writes its own and reads those of the others."""

    def served(self, tenant: str, tokens: int) -> None:
        """This worker charged ``tokens`` more to ``tenant``; negative for a correction."""

    def others(self, tenant: str) -> int:
        """The total that the others have charged to ``tenant``."""


class _Adapter(VirtualCounter):
    """A tenant's requests for one adapter, by ticket."""

    __slots__ = ("requests",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.requests: OrderedSet[Request] = OrderedSet()


class _Tenant(VirtualCounter):
    """A tenant's adapters, and those of its requests that may be displaced, the youngest last.

    ``seen`` is the others' charge that its counter here includes.
    """

    __slots__ = ("adapters", "seen", "young")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.adapters: VirtualCounters[_Adapter] = VirtualCounters(_Adapter, MOST_ADAPTERS)
        self.young: dict[int, Request] = {}
        self.seen = 0


class _Charge:
    __slots__ = ("adapter", "tenant", "tokens")

    def __init__(self, tenant: _Tenant, adapter: _Adapter, tokens: int) -> None:
        self.tenant = tenant
        self.adapter = adapter
        self.tokens = tokens


class FairQueue:
    """The default :class:`Discipline`: the least served tenant first, and of its adapters the least served.

    ``weight`` is a tenant's share, read when it begins to wait. ``peers`` adds to a waiting tenant what other
    workers serve it meanwhile.
    """

    def __init__(
        self, weight: Callable[[str], float] = lambda tenant: 1.0, peers: Peers | None = None
    ) -> None:
        self._weight = weight
        self._peers = peers
        self._tenants: VirtualCounters[_Tenant] = VirtualCounters(_Tenant, MOST_TENANTS)
        self._longest: OrderedSet[_Tenant] = OrderedSet()
        self._count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._count

    def add(self, request: Request, *, returned: bool) -> None:
        tenant = self._tenants.flow(request.tenant)
        if not tenant.tokens:
            tenant.weight = self._weight(tenant.name)
            if self._peers is not None:
                tenant.seen = self._peers.others(tenant.name)
        adapter = tenant.adapters.flow(request.adapter)
        adapter.requests.put(request, request.ticket)
        tenant.adapters.join(adapter, request.ticket)
        self._tenants.join(tenant, request.ticket)
        if not returned:
            tenant.young[request.ticket] = request
        self._waits(tenant, adapter, cost(request), 1)

    def remove(self, request: Request) -> None:
        tenant = self._tenants.flow(request.tenant)
        adapter = tenant.adapters.flow(request.adapter)
        adapter.requests.drop(request)
        tenant.young.pop(request.ticket, None)
        self._waits(tenant, adapter, -cost(request), -1)
        if not adapter.requests:
            tenant.adapters.leave(adapter)
        if not tenant.tokens:
            self._tenants.leave(tenant)

    def walk(self) -> Iterator[QueueOrder]:
        return _by_turns(self._tenants, _of_tenant)

    def charge(self, request: Request) -> _Charge:
        tokens = cost(request)
        tenant = self._tenants.begin(request.tenant, tokens)
        adapter = tenant.adapters.begin(request.adapter, tokens)
        if self._peers is not None:
            self._peers.served(tenant.name, tokens)
            if tenant.tokens:
                self._count_peer(tenant, self._peers)
        return _Charge(tenant, adapter, tokens)

    def settle(self, charge: _Charge, tokens: int) -> None:
        more, charge.tokens = tokens - charge.tokens, tokens
        if not more:
            return
        self._tenants.correct(charge.tenant, more)
        charge.tenant.adapters.correct(charge.adapter, more)
        if self._peers is not None:
            self._peers.served(charge.tenant.name, more)

    def ended(self, charge: _Charge) -> None:
        charge.tenant.running -= 1
        charge.adapter.running -= 1

    def ahead(self, newcomer: Request) -> float:
        """Its own backlog at its share of the rate, and what the others are owed; at most all that waits."""
        tenants = self._tenants
        tenant = tenants.find(newcomer.tenant)
        if tenant is None:
            return 0.0
        others = tenants.weight - (tenant.weight if tenant.tokens else 0.0)
        owed = max(0.0, tenant.counter - tenants.level) * others
        return min(self.tokens, owed + tenant.tokens * (tenant.weight + others) / tenant.weight)

    def victim(self, newcomer: Request | None) -> Request | None:
        """The youngest request of the tenant with the longest backlog for its weight, if that is another."""
        bar = 0.0
        if newcomer is not None:
            own = self._tenants.flow(newcomer.tenant)
            bar = (own.tokens + cost(newcomer)) / own.weight
        for tenant, backlog in self._longest:
            if -backlog <= bar:
                return None
            if tenant.young:
                return tenant.young[next(reversed(tenant.young))]
        return None

    def count_peers(self) -> None:
        """Add what other workers served meanwhile to the tenants that wait here."""
        if self._peers is not None:
            for tenant, _ in list(self._tenants.waiting):
                self._count_peer(tenant, self._peers)

    def _count_peer(self, tenant: _Tenant, peers: Peers) -> None:
        # Only tenants that wait here are compared, so the others' charges do not matter for the rest.
        now = peers.others(tenant.name)
        if now != tenant.seen:
            self._tenants.correct(tenant, now - tenant.seen)
        tenant.seen = now

    def _waits(self, tenant: _Tenant, adapter: _Adapter, tokens: int, count: int) -> None:
        self._count += count
        self.tokens += tokens
        adapter.tokens += tokens
        tenant.tokens += tokens
        if tenant.tokens:
            self._longest.put(tenant, -tenant.tokens / tenant.weight)
        else:
            self._longest.drop(tenant)


def cost(request: Request) -> int:
    """The charge for a request in tokens, at least 1."""
    tokens = request.prompt_tokens + request.output_tokens
    return tokens if tokens > 1 else 1


def _of_tenant(tenant: _Tenant) -> Iterator[Request]:
    return (turn.request for turn in _by_turns(tenant.adapters, _of_adapter))


def _of_adapter(adapter: _Adapter) -> Iterator[Request]:
    return (request for request, _ in adapter.requests)


def _by_turns(counters: VirtualCounters[F], of: Callable[[F], Iterator[Request]]) -> Iterator[QueueOrder]:
    """The waiting requests of all flows in the order in which they would be served."""
    fresh = iter(counters.waiting)
    begun: list[tuple[float, int, F, Iterator[Request]]] = []
    flow = next(fresh, None)
    turns = 0
    while flow is not None or begun:
        if flow is not None and (not begun or flow[1] <= begun[0][0]):
            tag, serving, requests = flow[1], flow[0], of(flow[0])
            flow = next(fresh, None)
        else:
            tag, _, serving, requests = heappop(begun)
        request = next(requests, None)
        if request is None:
            continue
        yield QueueOrder(request, tag)
        turns += 1
        heappush(begun, (tag + cost(request) / serving.weight, turns, serving, requests))


def has_fair_share(
    running: int, waiting: int, theirs_running: int, theirs_waiting: int, *, was_last: bool = False
) -> bool:
    """Whether a worker leaves the next slot to requests that wait in other workers of its host.

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
    return running + 1 > math.floor((running + theirs_running + 1) * mine / (mine + theirs) + 0.5)


class ReservedSlots:
    """Slots reserved for tenants below their share (``weight``), for one model in one worker.

    In fair order alone a quiet tenant waits until a request of a busy one ends. While more than one tenant is
    active (``contended``), one that runs more than its share leaves the last slots to the others.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._active: dict[str, float] = {}
        self._running: Counter[str] = Counter()
        self.contended = False

    def arrived(self, tenant: str, at: float) -> None:
        """A request of ``tenant`` arrived at ``at`` (seconds, monotonic)."""
        active = self._active
        active.pop(tenant, None)
        active[tenant] = at  # the least recent comes first
        while (oldest := next(iter(active))) != tenant and active[oldest] < at - ACTIVE_S:
            del active[oldest]
        self.contended = len(active) > 1

    def began(self, tenant: str) -> None:
        self._running[tenant] += 1

    def ended(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def kept_from(self, tenant: str, free: int, replicas: int) -> int:
        """How many of the ``free`` slots ``tenant`` leaves on each replica; -1 if it may take none.

        They are spread over the replicas, so that requests that arrive together do not wait for each other.
        """
        if not self.contended:
            return 0
        slots = free + self._running.total()
        weights = sum(self._weight(name) for name in self._active)
        if self._running[tenant] < slots * self._weight(tenant) / weights:
            return 0
        kept = 1 + math.ceil(slots / ONE_IN)
        return kept // replicas if free > kept else -1
