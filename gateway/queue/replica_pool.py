"""The replicas of one model as the dispatcher of this worker sees them, and the other workers of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass
from time import monotonic
from typing import Final

from gateway.routing.fleet import ServedModel
from gateway.routing.model_routers import ModelRouters
from gateway.routing.replica_handle import ReplicaHandle
from gateway.routing.shared_counters import SharedCounts
from policy.admission.affinity_dispatch import has_room
from policy.admission.queue import QueueLimits
from policy.admission.worker_slot_sharing import RANKS, YieldedSlots, has_fair_share
from policy.config.deployment import Deployment
from policy.errors import TargetError
from policy.hashing import hash_name
from policy.request import Request
from policy.routing.cost import Candidate, CostEstimate
from policy.routing.replica_health import CircuitBreakerState
from policy.types import Priority

# Compared for each request: machine code reads a constant faster than a member of an enumeration.
_CLOSED: Final = CircuitBreakerState.CLOSED

# The slots of a replica whose bound is unknown.
MANY: Final = 1_000_000


@dataclass(eq=False)
class ModelReplicaPool:
    """A :class:`policy.admission.dispatcher.ReplicaPool`.

    ``queued_for_other_models``: their waiting bytes; ``shared``: the counts of all workers of the host.
    """

    served: ServedModel
    routers: ModelRouters
    deployment: Callable[[], Deployment]
    shared: SharedCounts
    queued_for_other_models: Callable[[], int]

    def __post_init__(self) -> None:
        self._key = hash_name(f"waits for {self.served.name}")
        self._keys = [hash_name(f"waits for {self.served.name}, {rank}") for rank in range(RANKS)]
        self._left = YieldedSlots()
        self._handles: dict[str, ReplicaHandle] = {}
        self._begun_by_others = -1

    @property
    def ready(self) -> bool:
        return any(handle.admissible or handle.full for handle in self.served.handles)

    @property
    def down(self) -> bool:
        return self.served.down

    @property
    def closing(self) -> bool:
        return self.served.closes_at < math.inf

    @property
    def gives_way(self) -> bool:
        return self.served.gives_way

    def ttft_slo_s(self, priority: Priority) -> float | None:
        try:
            return self.deployment().model(self.served.name).control.slo_of(priority).ttft_p95_s
        except TargetError:  # the controller still has the model, the deployment no longer
            return None

    def bounds(self, request: Request, queued: int) -> QueueLimits:
        limits, elsewhere = self.deployment().gateway, self.queued_for_other_models()
        # A body that is larger than the limit may wait where nothing else does, of any model.
        size = limits.max_queue_bytes - elsewhere if elsewhere or queued else request.size
        return QueueLimits(limits.max_queue, size)

    def candidates(self) -> list[Candidate]:
        self.shared.refresh()
        alone = self.shared.alone
        now = monotonic() if alone else math.inf
        found = []
        for handle in self.served.handles:
            breaker = handle.breaker
            # ReplicaHandle.admissible, as far as it goes for a replica in good standing
            if (breaker.reachable and breaker.state is _CLOSED and not handle.full) or handle.admissible:
                found.append(handle.view if handle.lone and now < handle.due_at else handle.look())
        return found

    def full(self) -> list[Candidate]:
        return [
            handle.view
            for handle in self.served.handles
            if handle.full and handle.breaker.reachable and handle.breaker.state is _CLOSED
        ]

    def replica(self, candidate: Candidate) -> ReplicaHandle:
        handle = self._handles.get(candidate.id)
        if handle is None or handle.view is not candidate:
            self._handles = {each.id: each for each in self.served.handles}
            handle = self._handles[candidate.id]
        return handle

    def serves(self, candidate: Candidate, adapter: str) -> bool:
        return not adapter or self.replica(candidate).adapters.serves(adapter)

    def unserved(self, adapters: Set[str], candidates: list[Candidate]) -> set[str]:
        found = [self.replica(each).adapters for each in candidates]
        if any(each.serves_all for each in found):
            return set()
        left = set(adapters)
        for each in found:
            each.drop_served(left)
        return left

    def choose(self, request: Request, candidates: list[Candidate], at: float) -> CostEstimate | None:
        quote = self.routers.choose(request, candidates, at)
        while quote is not None and not self._has_room_still(quote.candidate):
            quote = self.routers.choose(request, candidates, at)
        return quote

    def _has_room_still(self, candidate: Candidate) -> bool:
        """Whether no other worker took its last slot meanwhile: a choice takes long enough for that."""
        if self.shared.alone:
            return True
        self.shared.refresh()
        return has_room(self.replica(candidate).look())

    def loss_s(self, request: Request, candidate: Candidate, replicas: int, at: float) -> float:
        return self.routers.loss_s(request, candidate, replicas, at)

    def unavailable(self, at: float) -> bool:
        return self.served.is_unavailable(at)

    def cannot_load(self, adapter: str) -> bool:
        return self.served.cannot_load(adapter)

    def service_s(self, request: Request) -> float:
        views = [handle.view for handle in self.served.handles if handle.admissible or handle.full]
        return self.routers.service_s(request, views)

    def remaining_s(self, request: Request, quote: CostEstimate, ran_s: float) -> float:
        return self.routers.remaining_s(request, quote.candidate, ran_s)

    def lasting(self, request: Request, candidates: list[Candidate], at: float) -> list[Candidate]:
        left_s = self.served.closes_at - at
        return [
            each
            for each in candidates
            if self.served.stays(self.replica(each).replica) or self.routers.longest_s(request, each) < left_s
        ]

    def sent(self, request: Request, quote: CostEstimate, at: float) -> tuple[int, ...]:
        if not self.shared.alone and self.shared.others(self._key)[0]:
            self._begun_by_others = self._other_workers()[1]
        return self.routers.began(request, quote, at)

    def timed(self, request: Request, quote: CostEstimate, ttft_s: float, at: float) -> None:
        self.routers.timed(request, quote, ttft_s, at)

    def paced(self, quote: CostEstimate, gap_s: float) -> None:
        self.routers.paced(self.served.name, quote, gap_s)

    def counted(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        self.routers.counted(request, prompt_tokens, output_tokens)

    def queued(self, change: int, rank: int) -> None:
        for key in (self._key, self._keys[rank]):
            if change > 0:
                self.shared.begin(key, 0)
            else:
                self.shared.end(key)

    def granted(self, candidates: list[Candidate], rank: int, waiting: int, at: float) -> list[Candidate]:
        shared = self.shared
        if shared.alone or not shared.others(self._key)[0]:
            return candidates
        if not self._others_come_first(candidates, rank, waiting):
            return candidates
        higher = sum([shared.others(key)[2] for key in self._keys[: rank - rank % 2]])
        return [
            each
            for each in candidates
            if has_room(each) and not self._left.leaves(each, shared.others(each.key)[2], higher, at)
        ]

    def _others_come_first(self, candidates: list[Candidate], rank: int, waiting: int) -> bool:
        """Whether the next slot is for a request that waits in another worker."""
        theirs = [self.shared.others(key)[0] for key in self._keys[: rank + 1]]
        owed = rank - rank % 2
        if any(theirs[:owed]):  # of a higher priority
            return True
        if owed < rank and theirs[owed]:
            free = sum([each.bound - each.in_flight if each.bound else MANY for each in candidates])
            return free <= theirs[owed]
        if not theirs[rank]:
            return False
        running = sum([handle.mine for handle in self.served.handles])
        elsewhere, begun = self._other_workers()
        was_last = begun == self._begun_by_others
        return has_fair_share(running, waiting, elsewhere, theirs[rank], was_last=was_last)

    def _other_workers(self) -> tuple[int, int]:
        """How many requests of other workers of this host run, and how many they ever sent."""
        counts = [self.shared.others(handle.view.key) for handle in self.served.handles]
        return sum([count[0] for count in counts]), sum([count[2] for count in counts])


class SharedTokenCounts:
    """What the other workers of this host charge to the tenants of one model, for its queue's counters."""

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
