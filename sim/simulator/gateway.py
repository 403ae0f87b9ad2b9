"""The gateway of one simulated model: it drives the production dispatcher in virtual time.

It has one worker, which sees its replicas at once and misses no report.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Set

from policy.admission.dispatcher import Dispatcher, DispatchTicket
from policy.admission.queue import QueueLimits
from policy.admission.retry_policy import AttemptOutcome, Rejection, RejectionCause
from policy.config.deployment import Deployment
from policy.engine.builtin_profiles import max_request_tokens
from policy.hashing import hash_name
from policy.request import AnswerLength, Request
from policy.routing.cost import Candidate, CostEstimate
from policy.routing.router import Router
from policy.routing.settings import RoutingSettings, settings_of
from policy.signals.gateway_worker_counters import WorkerCounters
from policy.types import Priority
from policy.wire.capture import BLOCK_TOKENS
from policy.wire.controller_reports import ModelReport
from policy.wire.load_stream import CachedPrefix
from sim.arrivals import Arrival
from sim.simulator.engine import EngineJob, blocks_of
from sim.simulator.fleet import Fleet
from sim.simulator.replica import SimulatedReplica, SimulatedTicket
from sim.simulator.run_record import RequestOutcome

# The blocks at whose ends a gateway hashes a prompt, as `gateway/protocol/prompt_features.py` does at four
# bytes a token: each one up to 32 KiB, then four per doubling, up to 64 MiB.
_FINE, _PER_DOUBLING, _DOUBLINGS = 16, 4, 11
HASHED = (
    *range(1, _FINE),
    *(int(_FINE * 2 ** (i / _PER_DOUBLING)) for i in range(_PER_DOUBLING * _DOUBLINGS + 1)),
)
RouterFactory = Callable[[RoutingSettings], Router]
_EVEN = 0xFFFF_FFFF_FFFF_FFFE
# The outcome of a rejection; of other causes FAILED.
_OUTCOMES = {
    RejectionCause.LATE: RequestOutcome.REFUSED,
    RejectionCause.FULL: RequestOutcome.REFUSED,
    RejectionCause.DISPLACED: RequestOutcome.REFUSED,
    RejectionCause.DEADLINE: RequestOutcome.EXPIRED,
}


class SimulatedPool:
    """The replicas of one model as a :class:`policy.admission.replica_pool_interface.ReplicaPool`."""

    def __init__(
        self,
        deployment: Deployment,
        fleet: Fleet,
        rng: random.Random,
        queued_elsewhere: Callable[[], int],
        router: Router,
    ) -> None:
        self.router = router
        self.answers = AnswerLength()
        self._control = fleet.spec.control
        self._limits = deployment.gateway
        self._fleet = fleet
        self._rng = rng
        self._queued_elsewhere = queued_elsewhere
        self._followed: set[int] = set()

    @property
    def ready(self) -> bool:
        return bool(self._fleet.serving)

    @property
    def down(self) -> bool:
        return not self._fleet.serving

    @property
    def closing(self) -> bool:
        return self._fleet.closes_at < math.inf

    @property
    def gives_way(self) -> bool:
        return self._fleet.gives_way

    def ttft_slo_s(self, priority: Priority) -> float | None:
        return self._control.slo_of(priority).ttft_p95_s

    def bounds(self, request: Request, queued: int) -> QueueLimits:
        elsewhere = self._queued_elsewhere()
        size = self._limits.max_queue_bytes - elsewhere if elsewhere or queued else request.size
        return QueueLimits(self._limits.max_queue, size)

    def candidates(self) -> list[Candidate]:
        return self._fleet.views

    def full(self) -> list[Candidate]:
        return []

    def replica(self, candidate: Candidate) -> SimulatedReplica:
        return self._fleet.serving[self._fleet.views.index(candidate)]

    def serves(self, candidate: Candidate, adapter: str) -> bool:
        return True

    def unserved(self, adapters: Set[str], candidates: list[Candidate]) -> set[str]:
        return set()

    def choose(self, request: Request, candidates: list[Candidate], at: float) -> CostEstimate | None:
        return self.router.choose(request, candidates, at, self._rng.random()).chosen

    def loss_s(self, request: Request, candidate: Candidate, replicas: int, at: float) -> float:
        return self.router.loss_s(request, candidate, replicas, at)

    def unavailable(self, at: float) -> bool:
        return False

    def cannot_load(self, adapter: str) -> bool:
        return False

    def service_s(self, request: Request) -> float:
        return self.router.service_s(request, self._fleet.views)

    def remaining_s(self, request: Request, quote: CostEstimate, ran_s: float) -> float:
        return self.router.remaining_s(request, quote.candidate, ran_s)

    def lasting(self, request: Request, candidates: list[Candidate], at: float) -> list[Candidate]:
        left_s = self._fleet.closes_at - at
        return [
            each
            for each in candidates
            if self.replica(each).key == self._fleet.goal or self.router.longest_s(request, each) < left_s
        ]

    def sent(self, request: Request, quote: CostEstimate, at: float) -> tuple[int, ...]:
        if quote.candidate.key not in self._followed:
            # The first line of a load stream.
            self._followed.add(quote.candidate.key)
            self.router.cached((), (), quote.candidate.key, at, reset=True)
        return self.router.began(request, quote.candidate, at)

    def timed(self, request: Request, quote: CostEstimate, ttft_s: float, at: float) -> None:
        self.router.timed(request, quote, ttft_s, at)

    def paced(self, quote: CostEstimate, gap_s: float) -> None:
        self.router.paced(quote.candidate, gap_s)

    def counted(self, request: Request, prompt_tokens: int, output_tokens: int) -> None:
        self.answers.learn(output_tokens)

    def queued(self, change: int, rank: int) -> None:
        """Nothing to do: there is no other worker."""

    def granted(self, candidates: list[Candidate], rank: int, waiting: int, at: float) -> list[Candidate]:
        return candidates


class SimulatedGateway:
    """``over`` is called with each request's outcome; instants are seconds of the run.

    ``queued_elsewhere`` returns the bytes of the requests that wait for other models, ``router`` makes the
    router.
    """

    def __init__(
        self,
        deployment: Deployment,
        fleet: Fleet,
        rng: random.Random,
        *,
        router: RouterFactory = Router,
        over: Callable[[SimulatedTicket, RequestOutcome, float], None],
        queued_elsewhere: Callable[[], int],
    ) -> None:
        self.spec = spec = fleet.spec
        self.totals = WorkerCounters()
        self.totals.set_slo(spec.control)
        self.in_flight = 0
        self._gateway = deployment.gateway
        self._tenants = {tenant.name: tenant for tenant in deployment.tenants}
        self._fleet = fleet
        self._over = over
        self._at = 0.0
        self._longest = {name: max_request_tokens(spec, shape) for name, shape in spec.shapes.items()}
        self._pool = SimulatedPool(deployment, fleet, rng, queued_elsewhere, router(settings_of(spec)))
        fleet.health.configure(deployment.gateway.eject, deployment.gateway.retry)
        self.dispatcher: Dispatcher[SimulatedReplica] = Dispatcher(
            self._pool, fleet.health, weight=self._weight, resolved=self._resolved
        )

    @property
    def queued(self) -> int:
        return len(self.dispatcher.waiting)

    def report(self, at: float) -> ModelReport:
        """The report of a gateway worker on this model."""
        return self.totals.report(
            in_flight=self.in_flight,
            queued=self.queued,
            oldest_s=self.dispatcher.oldest_s(at),
            running=self._fleet.running_streams(),
            drain_s=self.dispatcher.drain_s(at, self.dispatcher.begun_before(self._fleet.closing_since)),
        )

    def arrive(self, number: int, arrival: Arrival, at: float) -> None:
        """Admit a request: it goes to a replica, waits, or is rejected."""
        self.in_flight += 1
        self.totals.arrive(arrival.input_tokens)
        self._enter(SimulatedTicket(self.dispatcher, self._request(arrival, at), number, arrival), at)

    def first_token(self, ticket: SimulatedTicket, at: float) -> None:
        ticket.first_at = at
        ticket.first(at)

    def ended(self, ticket: SimulatedTicket, at: float) -> None:
        arrival = ticket.arrival
        assert ticket.first_at is not None
        gap_s = ticket.gap_s(at)
        tokens = arrival.input_tokens, arrival.output_tokens
        ticket.end(at, AttemptOutcome.SERVED, tokens, gap_s=gap_s)
        totals = self.totals
        ttft_s, e2e_s = ticket.first_at - ticket.request.arrived, at - ticket.request.arrived
        totals.first_token(ttft_s, ticket.request.priority)
        totals.end(e2e_s)
        totals.count_tokens(arrival.input_tokens, ticket.cached_tokens, arrival.output_tokens)
        totals.judge(ttft_s, gap_s, ticket.request.priority)
        self._leave(ticket, RequestOutcome.SERVED, at)

    def broken(self, ticket: SimulatedTicket, at: float) -> None:
        begun = ticket.first_at is not None
        self._failed(ticket, AttemptOutcome.BROKEN if begun else AttemptOutcome.LOST, at)

    def offer(self, at: float) -> None:
        """Give free slots to waiting requests."""
        self._at = at
        while not self.dispatcher.offer(at):
            pass

    def expire(self, at: float) -> None:
        """Reject the requests whose deadline has passed."""
        self._at = at
        while not self.dispatcher.expire(at):
            pass

    def gone(self, runner: SimulatedReplica) -> None:
        self._pool.router.forget(runner.view.key)

    def reported(self, runner: SimulatedReplica, at: float) -> None:
        """A replica reports its KV in use, and which of the prefixes named there were stored and removed.

        What a prefix has in host memory is that of when its last block was stored or moved.
        """
        runner.view.kv_used = runner.engine.kv_used
        held: dict[int, CachedPrefix] = {}
        gone: dict[int, CachedPrefix] = {}
        cache = runner.engine.cache
        changed = () if cache is None else dict.fromkeys(change.block for change in cache.take_changes())
        for block in changed:
            assert cache is not None
            stored = block in cache
            for value, (tokens, blocks) in runner.names.get(block, {}).items():
                news, other = (held, gone) if stored else (gone, held)
                host = cache.in_host(blocks, tokens) if stored else 0
                news[value] = CachedPrefix(value, tokens - host, host)
                other.pop(value, None)
            if not stored:
                runner.names.pop(block, None)
        if held or gone:
            key = runner.view.key
            self._pool.router.cached(list(held.values()), list(gone.values()), key, at, reset=False)

    def adapters_reported(self, runner: SimulatedReplica) -> None:
        """A replica reports which adapters it has loaded."""
        loaded = [self.adapter_key(adapter) for adapter in runner.engine.slots.loaded]
        self._pool.router.holds(loaded, (), runner.view.key)

    def adapter_key(self, adapter: str) -> int:
        """The hash of an adapter in the router."""
        return hash_name(f"{self.spec.name} {adapter}") | 1

    def _request(self, arrival: Arrival, at: float) -> Request:
        tenant = self._tenants.get(arrival.tenant)
        priority = self._gateway.priority if tenant is None else tenant.priority
        adapter_key = self.adapter_key(arrival.adapter) if arrival.adapter else 0
        salt = adapter_key ^ (hash_name(arrival.tenant) if arrival.tenant else 0)
        blocks, prompt = arrival.blocks, arrival.input_tokens
        ends = HASHED[: bisect_right(HASHED, len(blocks))]
        return Request(
            self.spec.name,
            tenant=arrival.tenant,
            priority=priority,
            adapter=arrival.adapter,
            adapter_key=adapter_key,
            prompt_tokens=prompt,
            output_tokens=max(1, int(self._pool.answers.mean)),
            long_tokens=self._pool.answers.long(),
            prefix=tuple([hash((blocks[end - 1], salt)) & _EVEN for end in ends]),
            depths=tuple([min(end * BLOCK_TOKENS, prompt) for end in ends]),
            session=arrival.session,
            size=4 * prompt,
            arrived=at,
            deadline=at + self._gateway.queue_timeout_s,
        )

    def _enter(self, ticket: SimulatedTicket, at: float) -> None:
        self._at = at
        ticket.enter(at)
        if not ticket.queued:
            self._resolved(ticket)

    def _resolved(self, ticket: DispatchTicket[SimulatedReplica]) -> None:
        assert isinstance(ticket, SimulatedTicket)
        if ticket.rejection is None:
            self._start(ticket, self._at)
        else:
            self._reject(ticket, ticket.rejection, self._at)

    def _start(self, ticket: SimulatedTicket, at: float) -> None:
        arrival, runner = ticket.arrival, ticket.replica
        assert runner is not None
        ticket.runner, ticket.sent_at = runner, at
        ticket.began(at)
        tokens = arrival.input_tokens, arrival.output_tokens
        job = EngineJob(ticket.number, *tokens, arrival.adapter, arrival.blocks)
        request = ticket.request
        blocks = blocks_of(job)
        for end, value, depth in zip(HASHED, request.prefix, request.depths, strict=False):
            runner.names.setdefault(blocks[end - 1], {})[value] = depth, blocks
        most = self._longest[runner.key.shape]
        try:
            if most is not None and sum(tokens) > most:
                raise ValueError(f"{tokens[0]} + {tokens[1]} of {most} tokens")
            self._fleet.submit(runner, ticket, job, at)
        except ValueError:
            # Longer than the context or the KV cache: every engine refuses it.
            self._failed(ticket, AttemptOutcome.REJECTED, at)

    def _failed(self, ticket: SimulatedTicket, outcome: AttemptOutcome, at: float) -> None:
        ticket.end(at, outcome)
        if ticket.rejection is not None:
            self._reject(ticket, ticket.rejection, at)
        elif outcome is AttemptOutcome.BROKEN:
            self._leave(ticket, RequestOutcome.FAILED, at)
        else:
            self._enter(ticket, at)

    def _reject(self, ticket: SimulatedTicket, rejection: Rejection, at: float) -> None:
        outcome = _OUTCOMES.get(rejection.cause, RequestOutcome.FAILED)
        if outcome is not RequestOutcome.FAILED or rejection.cause is RejectionCause.RETRIES_SPENT:
            self.totals.refused += 1
        self._leave(ticket, outcome, at)

    def _leave(self, ticket: SimulatedTicket, outcome: RequestOutcome, at: float) -> None:
        self.in_flight -= 1
        self._over(ticket, outcome, at)

    def _weight(self, tenant: str) -> float:
        found = self._tenants.get(tenant)
        return 1.0 if found is None else found.weight
