"""Token-weighted fairness: tenants share a model by their weights, and adapters share within a tenant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import Protocol, TypeVar

from policy.admission.discipline import QueueOrder
from policy.admission.ordered_set import OrderedSet
from policy.admission.virtual_counters import VirtualCounter, VirtualCounters
from policy.request import Request

# Idle tenants beyond these are forgotten; the adapters of each tenant are bounded separately.
MOST_TENANTS = 4096
MOST_ADAPTERS = 256


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
    __slots__ = ("adapter", "running", "tenant", "tokens")

    def __init__(self, tenant: _Tenant, adapter: _Adapter, tokens: int) -> None:
        self.tenant = tenant
        self.adapter = adapter
        self.tokens = tokens
        self.running = True


class FairQueue:
    """A :class:`policy.admission.discipline.Discipline`: the least served tenant first, and of its adapters
    the least served.

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
                self._hear(tenant, self._peers)
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
        if charge.running:
            charge.running = False
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

    def spare(self, newcomer: Request | None) -> Request | None:
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

    def hear(self) -> None:
        """Add what other workers served meanwhile to the tenants that wait here."""
        if self._peers is not None:
            for tenant, _ in list(self._tenants.waiting):
                self._hear(tenant, self._peers)

    def _hear(self, tenant: _Tenant, peers: Peers) -> None:
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


F = TypeVar("F", bound=VirtualCounter)


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
