"""Fairness: tenants share a model by their weights in tokens, and adapters share within a tenant.

:class:`QueueDiscipline` is the port for another order of service (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from heapq import heappop, heappush
from typing import Final, NamedTuple, Protocol, TypeVar

from policy.admission.indexed_heap import IndexedHeap
from policy.admission.virtual_counters import VirtualCounter, VirtualCounters
from policy.request import Request

# Idle tenants beyond these are forgotten; the adapters of each tenant are bounded separately.
MOST_TENANTS: Final = 4096
MOST_ADAPTERS: Final = 256
# How many adapters are passed over one by one; of more, a walk does not come across their requests.
PASSED_OVER: Final = 32

Charge = TypeVar("Charge")
F = TypeVar("F", bound=VirtualCounter)


class QueueOrder(NamedTuple):
    """A request and its virtual start ``tag`` in weighted tokens; requests are served in order of tags."""

    request: Request
    tag: float


class QueueDiscipline(Protocol[Charge]):
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

    def walk(self, without: Set[str] = frozenset()) -> Iterator[QueueOrder]:
        """All waiting requests in the order of service; the queue must not change meanwhile.

        ``without`` are adapters whose requests may be left out; more may be added during the walk.
        """

    def charge(self, request: Request) -> Charge:
        """Charge a request that begins; one that waited was removed before."""

    def settle(self, charge: Charge, tokens: int) -> None:
        """Correct the charge to ``tokens``; 0 takes it back. May be called again."""

    def ended(self, charge: Charge) -> None:
        """The request no longer runs; called once."""

    def is_owed(self, request: Request) -> bool:
        """Whether a request, which was added last, goes before those in other workers of this priority."""

    def ahead(self, newcomer: Request) -> float:
        """About how many tokens of this priority would be served before ``newcomer``."""

    def count_peers(self) -> None:
        """Charge what other workers served, if the discipline shares them; called regularly."""

    def victim(self, newcomer: Request | None) -> Request | None:
        """The request that makes room for ``newcomer`` of this priority, or of a higher one (``None``)."""


class PeerTokenCounts(Protocol):
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
        self.requests: IndexedHeap[Request] = IndexedHeap()


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
    """The default :class:`QueueDiscipline`: the least served tenant first, and of its adapters the least
    served.

    ``weight`` is a tenant's share, read when it begins to wait. ``peers`` adds to a waiting tenant what other
    workers serve it meanwhile.
    """

    def __init__(
        self, weight: Callable[[str], float] = lambda tenant: 1.0, peers: PeerTokenCounts | None = None
    ) -> None:
        self._weight = weight
        self._peers = peers
        self._tenants: VirtualCounters[_Tenant] = VirtualCounters(_Tenant, MOST_TENANTS)
        self._longest: IndexedHeap[_Tenant] = IndexedHeap()
        # The tenants that wait for each adapter, with their requests for it.
        self._flows: dict[str, dict[_Tenant, _Adapter]] = {}
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
        self._flows.setdefault(request.adapter, {})[tenant] = adapter
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
            flows = self._flows[request.adapter]
            del flows[tenant]
            if not flows:
                del self._flows[request.adapter]
        if not tenant.tokens:
            self._tenants.leave(tenant)

    def walk(self, without: Set[str] = frozenset()) -> Iterator[QueueOrder]:
        """A tenant's turn is not put off by those of its requests that are left out from the start."""
        if len(without) <= PASSED_OVER:
            return _by_turns(
                iter(self._tenants.waiting),
                lambda tenant: _of_tenant(iter(tenant.adapters.waiting), without),
            )
        adapters: dict[_Tenant, list[_Adapter]] = {}
        for name in self._flows.keys() - without:
            for tenant, adapter in self._flows[name].items():
                adapters.setdefault(tenant, []).append(adapter)
        return _by_turns(
            self._tenants.among(list(adapters)),
            lambda tenant: _of_tenant(tenant.adapters.among(adapters[tenant]), without),
        )

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

    def is_owed(self, request: Request) -> bool:
        """The credit of its tenant covers it: levels differ between workers, but a credit holds in all."""
        tenant = self._tenants.flow(request.tenant)
        return tenant.counter + (tenant.tokens - cost(request)) / tenant.weight < tenant.floor

    def ahead(self, newcomer: Request) -> float:
        """Its own backlog, and what the others are served until its turn; at most all that waits."""
        tenants = self._tenants
        tenant = tenants.find(newcomer.tenant)
        if tenant is None:
            return 0.0
        others = tenants.weight - (tenant.weight if tenant.tokens else 0.0)
        turn = tenant.counter + tenant.tokens / tenant.weight
        least = next((counter for other, counter in tenants.waiting if other is not tenant), turn)
        return min(self.tokens, tenant.tokens + max(0.0, turn - least) * others)

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
            for tenant in tuple(self._tenants.waiting.puts):  # in any order: each is counted on its own
                self._count_peer(tenant, self._peers)

    def _count_peer(self, tenant: _Tenant, peers: PeerTokenCounts) -> None:
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


def _of_tenant(adapters: Iterator[tuple[_Adapter, float]], without: Set[str]) -> Iterator[Request]:
    for turn in _by_turns(adapters, lambda adapter: _of_adapter(adapter, without)):
        yield turn.request


def _of_adapter(adapter: _Adapter, without: Set[str]) -> Iterator[Request]:
    for request, _ in adapter.requests:
        if adapter.name in without:
            return
        yield request


def _by_turns(fresh: Iterator[tuple[F, float]], of: Callable[[F], Iterator[Request]]) -> Iterator[QueueOrder]:
    """The waiting requests of all flows, ``fresh`` in order, in the order in which they would be served."""
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
