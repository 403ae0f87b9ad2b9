"""The gateway's part of one model in virtual time: who waits, who is sent away, who goes where.

The queue, the batches, the router and the retries are production's own objects. What is left out is what they
are told of others: here is one gateway worker, which sees its replicas at once and never loses one's word.
This module is over 400 lines: a request before and after its replica shares one state.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Container, Iterator
from itertools import islice

from policy.admission.dispatch import FreeSlots, dispatch
from policy.admission.fairness import FairQueue
from policy.admission.queue import Admitted, Bounds, Queue, Waiting
from policy.admission.reserved_slots import ReservedSlots
from policy.config.deployment import Deployment, ModelSpec
from policy.engine.profiles import max_request_tokens
from policy.engine.step_table import step_table_of
from policy.errors import Refusal
from policy.hashing import hash_name
from policy.request import Request
from policy.routing.outlier_ejection import RetryBudget
from policy.routing.router import Candidate, CostEstimate, Router
from policy.routing.settings import START_SHARE, settings_of
from policy.signals.counters import WorkerCounters
from policy.types import Priority
from policy.wire.capture import BLOCK_TOKENS
from sim.arrival import Arrival
from sim.twin.engine import Job
from sim.twin.fleet import Fleet, TwinReplica
from sim.twin.record import Outcome

# Who waits is offered what has become free at each end, and so often beside: a gateway does so every 20 ms,
# which changes what is predicted to take too long by as little.
OFFER_S = 0.05
# How many hashes of a prompt a gateway looks at; those of the first half a million characters are as many.
MOST_HASHES = 64
# How far down the order a free slot is offered.
MOST_OFFERED = 64
_PROMISED = frozenset({Priority.STANDARD, Priority.SHEDDABLE})
_EVEN = 0xFFFF_FFFF_FFFF_FFFE
# What answers are taken to be like before one has ended, and how fast that is corrected: the gateway's own.
_OUTPUT_TOKENS = 128.0
_GAIN = 0.02


class TwinTicket:
    """One request on its way: what the trace says of it, what the policies know, and where it runs.

    ``sent_at`` and ``first_at`` are ``None`` before; ``pending`` are the tokens that it was taken to have to
    compute where it was sent, ``cached_tokens`` those that it did not.
    """

    __slots__ = (
        "arrival", "began", "cached_tokens", "entered", "first_at", "job", "number", "pending", "quote",
        "request", "runner", "sent_at",
    )  # fmt: skip

    def __init__(self, number: int, arrival: Arrival, request: Request) -> None:
        self.number = number
        self.arrival = arrival
        self.request = request
        self.job: Job | None = None
        self.runner: TwinReplica | None = None
        self.quote: CostEstimate | None = None
        self.began: Admitted | None = None
        self.entered = False
        self.pending = 0
        self.cached_tokens = 0
        self.sent_at: float | None = None
        self.first_at: float | None = None

    def gap_s(self, at: float) -> float:
        """The mean gap between its tokens, of which the last comes ``at``; 0 of a single one."""
        gaps = self.arrival.output_tokens - 1
        return (at - self.first_at) / gaps if gaps and self.first_at is not None else 0.0


class TwinGateway:
    """One model's. ``over`` is told what became of each request; instants are seconds of the run."""

    def __init__(
        self,
        spec: ModelSpec,
        deployment: Deployment,
        fleet: Fleet,
        rng: random.Random,
        over: Callable[[TwinTicket, Outcome, float], None],
    ) -> None:
        self.spec = spec
        self.totals = WorkerCounters()
        self.totals.promise(spec.control.slo)
        self.in_flight = 0
        self._gateway = deployment.gateway
        self._tenants = {tenant.name: tenant for tenant in deployment.tenants}
        self._fleet = fleet
        self._rng = rng
        self._over = over
        self._router = Router(settings_of(spec))
        self._retries = RetryBudget(deployment.gateway.retry)
        self._reserve = ReservedSlots(self._weight)
        self._places: dict[int, TwinTicket] = {}
        self._runs: dict[str, Counter[str]] = {}
        self._longest = {name: max_request_tokens(spec, shape) for name, shape in spec.shapes.items()}
        self._output_tokens = _OUTPUT_TOKENS
        self._answers = 0
        self.queue = Queue(lambda: FairQueue(self._weight, None))

    @property
    def queued(self) -> int:
        """How many wait for a replica."""
        return len(self.queue)

    def oldest_s(self, at: float) -> float:
        """For how long the one waits that waits the longest."""
        return max((at - request.arrived for request in self.queue.waiting.values()), default=0.0)

    def arrive(self, number: int, arrival: Arrival, at: float) -> None:
        """One comes: it goes to a replica, waits, or is turned away."""
        self.in_flight += 1
        self.totals.arrived += 1
        self._retries.request(at)
        place = TwinTicket(number, arrival, self._request(arrival, at))
        place.request.ticket = self.queue.ticket()
        self._reserve.came(place.request.tenant, at)
        self._admit(place, at)

    def first_token(self, place: TwinTicket, at: float) -> None:
        """Its first token came."""
        place.first_at = at
        runner, sent_at = place.runner, place.sent_at
        assert runner is not None and sent_at is not None and place.quote is not None
        self._prefilled(place, runner, at)
        self._router.timed(place.request, place.quote, at - sent_at, at)

    def ended(self, place: TwinTicket, at: float) -> None:
        """Its last token came."""
        arrival = place.arrival
        assert place.first_at is not None
        self._release(place, at, whole=True)
        assert place.quote is not None
        self._router.paced(place.quote.candidate, place.gap_s(at))
        if place.began is not None:
            self.queue.settle(place.began, arrival.input_tokens + arrival.output_tokens)
        self._answers += 1
        gain = max(_GAIN, 1.0 / self._answers)
        self._output_tokens += gain * (arrival.output_tokens - self._output_tokens)
        totals = self.totals
        ttft_s, e2e_s = place.first_at - place.request.arrived, at - place.request.arrived
        totals.ttft.add(ttft_s)
        totals.end(e2e_s)
        totals.count_tokens(arrival.input_tokens, place.cached_tokens, arrival.output_tokens)
        totals.judge(ttft_s, place.gap_s(at))
        self._leave(place, Outcome.SERVED, at)

    def broken(self, place: TwinTicket, at: float) -> None:
        """Its replica is gone: it is tried elsewhere, unless its answer has begun or too many are."""
        begun = place.first_at is not None
        runner = place.runner
        assert runner is not None
        self._release(place, at, whole=False)
        if begun or not self._retries.take(at):
            self._leave(place, Outcome.FAILED, at)
            return
        if place.began is not None:
            self.queue.settle(place.began, 0)
            place.began = None
        place.request.avoid.add(runner.view.id)
        self._admit(place, at)

    def offer(self, at: float) -> None:
        """Hand out what capacity there is."""
        queue = self.queue
        queue.serve(at, ready=bool(self._fleet.serving))
        if not queue or not self._has_room():
            return
        runners = {runner.view.id: runner for runner in self._fleet.serving}

        def quote(request: Request) -> CostEstimate | None:
            place = self._places[request.ticket]
            return place.quote if self._has_room() and self._choose(place, at) is not None else None

        def runs(candidate: Candidate) -> Container[str]:
            return {"", *self._runs.get(candidate.id, ())}

        picks = []
        for pick in dispatch(self._granted(), FreeSlots(quote, lambda request, candidate: True, runs)):
            place = self._places[pick.request.ticket]
            self._take(place, runners[pick.quote.candidate.id], at)
            picks.append(pick)
        for pick in picks:
            place = self._places.pop(pick.request.ticket)
            place.began = queue.begin(place.request, at)
            for passed in pick.passed:
                queue.pass_by(passed)
            self._start(place, at)

    def expire(self, at: float) -> None:
        """Turn away those whose time is over."""
        for request in self.queue.expire(at):
            place = self._places.pop(request.ticket)
            self.totals.refused += 1
            self._leave(place, Outcome.EXPIRED, at)

    def due_at(self, at: float) -> float:
        """When somebody that waits is to be looked at again, at the latest."""
        deadline = self.queue.next_deadline()
        if deadline is None:
            return math.inf
        return min(deadline, at + OFFER_S) if self._fleet.serving else deadline

    def gone(self, runner: TwinReplica) -> None:
        """A replica is there no more, or has forgotten all."""
        self._router.forget(runner.view.key)

    def told(self, runner: TwinReplica) -> None:
        """A replica says which adapters it has loaded."""
        loaded = [self.adapter_key(adapter) for adapter in runner.engine.adapters]
        self._router.holds(loaded, (), runner.view.key)

    def adapter_key(self, adapter: str) -> int:
        """The hash by which a gateway knows an adapter."""
        return hash_name(f"{self.spec.name} {adapter}") | 1

    def _request(self, arrival: Arrival, at: float) -> Request:
        tenant = self._tenants.get(arrival.tenant)
        priority = self._gateway.priority if tenant is None else tenant.priority
        adapter_key = self.adapter_key(arrival.adapter) if arrival.adapter else 0
        salt = adapter_key ^ (hash_name(arrival.tenant) if arrival.tenant else 0)
        blocks = arrival.blocks[:MOST_HASHES]
        prompt = arrival.input_tokens
        return Request(
            self.spec.name,
            tenant=arrival.tenant,
            priority=priority,
            adapter=arrival.adapter,
            adapter_key=adapter_key,
            prompt_tokens=prompt,
            output_tokens=max(1, int(self._output_tokens)),
            prefix=tuple([hash((block, salt)) & _EVEN for block in blocks]),
            depths=tuple([min((i + 1) * BLOCK_TOKENS, prompt) for i in range(len(blocks))]),
            session=arrival.session,
            size=4 * prompt,
            arrived=at,
            deadline=at + self._gateway.queue_timeout_s,
        )

    def _admit(self, place: TwinTicket, at: float) -> None:
        if not self.queue and (runner := self._choose(place, at)) is not None:
            place.entered = True
            self._take(place, runner, at)
            place.began = self.queue.begin(place.request, at)
            self._start(place, at)
            return
        if place.request.deadline <= at:
            self.totals.refused += 1
            self._leave(place, Outcome.EXPIRED, at)
            return
        self._wait(place, at)

    def _wait(self, place: TwinTicket, at: float) -> None:
        queue, request = self.queue, place.request
        serving = bool(self._fleet.serving)
        queue.serve(at, ready=serving)
        if place.entered:
            queue.put_back(request, at)
            self._places[request.ticket] = place
            return
        patience_s, promised_s = math.inf, self.spec.control.slo.ttft_p95_s
        if request.priority in _PROMISED and promised_s is not None:
            patience_s = START_SHARE * promised_s
            if request.priority is Priority.SHEDDABLE and serving:
                request.deadline = min(request.deadline, request.arrived + promised_s)
        if queue.unsure:
            queue.expect(self._stays_s(request))
        verdict = queue.enter(
            request,
            Bounds(self._gateway.max_queue, max(self._gateway.max_queue_bytes, request.size)),
            at,
            patience_s=patience_s,
            full=not self._has_room(),
            kept=self._keeps_for(request.tenant),
        )
        for displaced in verdict.displaced:
            self.totals.refused += 1
            self._leave(self._places.pop(displaced.ticket), Outcome.REFUSED, at)
        if verdict.refusal in (Refusal.OVERLOADED, Refusal.QUEUE_FULL):
            self.totals.refused += 1
            self._leave(place, Outcome.REFUSED, at)
            return
        place.entered = True
        self._places[request.ticket] = place

    def _choose(self, place: TwinTicket, at: float) -> TwinReplica | None:
        request = place.request
        kept = self._kept_from(request.tenant)
        if kept < 0:
            return None
        runners = self._fleet.serving
        if request.avoid:
            runners = [runner for runner in runners if runner.view.id not in request.avoid] or runners
        if kept:
            runners = [runner for runner in runners if runner.view.bound - runner.view.in_flight > kept]
        views = [runner.view for runner in runners]
        decision = self._router.choose(request, views, at, self._rng.random())
        if decision.chosen is None:
            return None
        place.quote = decision.chosen
        return runners[views.index(decision.chosen.candidate)]

    def _take(self, place: TwinTicket, runner: TwinReplica, at: float) -> None:
        """Take a slot of the replica: who else is picked now sees it."""
        quote = place.quote
        assert quote is not None
        place.runner, place.pending = runner, quote.uncached
        self._router.began(place.request, quote.candidate, at)
        view = runner.view
        view.in_flight += 1
        view.pending_tokens += place.pending
        view.begun += 1
        self._reserve.began(place.request.tenant)
        if place.request.adapter:
            self._runs.setdefault(view.id, Counter())[place.request.adapter] += 1

    def _start(self, place: TwinTicket, at: float) -> None:
        assert place.runner is not None
        arrival = place.arrival
        place.sent_at = at
        place.job = Job(
            number=place.number,
            input_tokens=arrival.input_tokens,
            output_tokens=arrival.output_tokens,
            adapter=arrival.adapter,
            blocks=arrival.blocks,
        )
        most = self._longest[place.runner.key.shape]
        try:
            if most is not None and arrival.input_tokens + arrival.output_tokens > most:
                raise ValueError(f"{arrival.input_tokens} + {arrival.output_tokens} of {most} tokens")
            self._fleet.submit(place.runner, place, at)
        except ValueError:
            # Longer than its context or its KV cache: an engine refuses it, as it would anywhere.
            self._release(place, at, whole=False)
            self._leave(place, Outcome.FAILED, at)

    def _release(self, place: TwinTicket, at: float, *, whole: bool) -> None:
        runner, request = place.runner, place.request
        assert runner is not None
        self._prefilled(place, runner, at)
        runner.view.in_flight -= 1
        if request.adapter:
            running = self._runs[runner.view.id]
            running[request.adapter] -= 1
            if not running[request.adapter]:
                del running[request.adapter]
        if place.began is not None and place.began.running:
            self.queue.ended(place.began, at, whole=whole)
            self._reserve.ended(request.tenant)

    def _prefilled(self, place: TwinTicket, runner: TwinReplica, at: float) -> None:
        if place.pending:
            runner.view.pending_tokens -= place.pending
            runner.view.turned_at = at
            place.pending = 0

    def _leave(self, place: TwinTicket, outcome: Outcome, at: float) -> None:
        self.in_flight -= 1
        self._over(place, outcome, at)

    def _has_room(self) -> bool:
        return any(not view.bound or view.in_flight < view.bound for view in self._fleet.views)

    def _stays_s(self, request: Request) -> float:
        """How long it runs by the engine model, beside as many as run on the fullest replica."""
        views = self._fleet.views
        if not views:
            return 0.0
        view = max(views, key=lambda each: each.in_flight)
        pace = step_table_of(view.timing, self._router.settings.assumed)
        return pace.stays_s(request, view.in_flight)

    def _weight(self, tenant: str) -> float:
        found = self._tenants.get(tenant)
        return 1.0 if found is None else found.weight

    def _kept_from(self, tenant: str) -> int:
        if not self._reserve.contended:
            return 0
        views = self._fleet.views
        if not all(view.bound for view in views):
            return 0
        free = sum(max(0, view.bound - view.in_flight) for view in views)
        return self._reserve.kept_from(tenant, free, len(views))

    def _keeps_for(self, tenant: str) -> bool:
        return self._reserve.contended and self._has_room() and self._kept_from(tenant) == 0

    def _granted(self) -> Iterator[Waiting]:
        """Those that wait, in order, without the tenants that have to leave the last slots to others."""
        for turn in islice(self.queue.walk(), MOST_OFFERED):
            if self._kept_from(turn.request.tenant) >= 0:
                yield turn
