"""Who may go to a replica now, who waits, and who is sent away: one queue for each model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Container, Set

from gateway.queue.model_queue import ModelQueue, QueuePort, Ticket
from gateway.queue.rejections import Rejections
from gateway.routing.fleet import FleetView, ServedModel
from gateway.routing.replica import ReplicaHandle
from gateway.routing.router import ModelRouters
from gateway.routing.shared_memory import LOCAL, SharedCounts
from gateway.telemetry.metrics import Metrics
from policy.admission.dispatch import FreeSlots, dispatch
from policy.admission.fairness import FairQueue
from policy.admission.queue import Bounds, Queue
from policy.admission.reserved_slots import ReservedSlots
from policy.config.deployment import Deployment
from policy.errors import TargetError
from policy.request import Request
from policy.routing.router import Candidate, CostEstimate
from policy.routing.settings import START_SHARE
from policy.types import Priority

__all__ = ["Admission", "Ticket"]

# While somebody waits and a replica is up, time alone may change what the router says.
TICK_S = 0.02
# Words of replicas that change nothing come by the hundred each second.
REST_S = 0.004
# Those who are refused rather than served later than is promised; others wait to their deadline.
_PROMISED = frozenset({Priority.STANDARD, Priority.SHEDDABLE})


class Admission:
    """Late binding: a request waits here, not in a replica, while none can take it.

    ``on_asleep`` is told of each request for a model that has no replica, and none that starts.
    """

    def __init__(
        self,
        fleet: FleetView,
        metrics: Metrics,
        routes: ModelRouters,
        deployment: Callable[[], Deployment],
        *,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        shared: SharedCounts = LOCAL,
    ) -> None:
        self._metrics = metrics
        self._turned_away = Rejections(metrics.queues)
        self._routes = routes
        self._deployment = deployment
        self._weight = weight
        self._shared = shared
        self._lines: dict[str, ModelQueue] = {}
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self.on_asleep: Callable[[str], None] = lambda model: None
        fleet.on_capacity, fleet.on_hopeless = self.pump, self.dismiss
        fleet.on_refused = self.give_up

    def arrive(self, served: ServedModel, request: Request) -> Ticket:
        """A place at the end of the model's queue."""
        line = self._lines.get(served.name)
        if line is None or line.served is not served:
            line = self._lines[served.name] = self._line(served)
        if served.asleep:
            self.on_asleep(served.name)
        request.ticket = line.queue.ticket()
        line.reserve.came(request.tenant, request.arrived)
        return Ticket(served, request, line)

    async def admit(self, place: Ticket) -> ReplicaHandle:
        """The replica to send it to, with its slot taken (:meth:`ReplicaHandle.begin`).

        Asking again after a refusal stands in the old place, uncharged, however full the queue has
        become. Raises :class:`gateway.protocol.errors.Refused` when the queue is full, when the wait would be
        longer than the deadline, or when that has passed.
        """
        line, queue = place.line, place.line.queue
        if place.began is not None:
            queue.settle(place.began, 0)
            place.began = None
        # Whoever waits stands first, unless this one was only sent back to its old place.
        free = not queue.waiting and not line.is_theirs(self._clock())
        if free and (link := self._choose(place)) is not None:
            place.entered = True
            self._send(place, link)
            self._begin(place, self._clock())
            return link
        now = self._clock()
        if place.request.deadline <= now:
            raise self._turned_away.expired(place)
        place.granted = self._loop.create_future()
        self._wait(place, now)
        try:
            return await place.granted
        except asyncio.CancelledError:
            queue.remove(place.request, self._clock())
            self._give_back(place)
            raise
        finally:
            line.waits_no_more(place)
            self._depths(line)

    def _give_back(self, place: Ticket) -> None:
        """Its client left; if it was granted a slot meanwhile, it never heard of it."""
        if place.began is not None and place.granted is not None:
            place.line.queue.settle(place.began, 0)
            self.release(place, place.granted.result(), whole=False)

    def release(self, place: Ticket, link: ReplicaHandle, *, whole: bool = True) -> None:
        """The request ended on ``link``: its slot is free. ``whole`` if it was served to its end."""
        if place.pending:
            link.first_token(place.pending)
            place.pending = 0
        if place.ahead is not None:
            link.over(place.ahead)
        link.end()
        line = place.line
        if place.request.adapter:
            line.leaves(place.request.adapter, link)
        if place.began is not None and place.began.running:
            line.queue.ended(place.began, self._clock(), whole=whole)
            line.reserve.ended(place.request.tenant)
        if line.queue.waiting:
            self._pump_soon(line)

    def first_token(self, place: Ticket, link: ReplicaHandle, ttft_s: float | None) -> None:
        """Its first token came, ``ttft_s`` seconds after it was sent; ``None`` where that cannot be seen."""
        if place.pending:
            link.first_token(place.pending)
            place.pending = 0
        if ttft_s is not None and place.quote is not None:
            self._routes.timed(place.request, place.quote, ttft_s)

    def paced(self, place: Ticket, gap_s: float) -> None:
        """Its answer ended; its tokens came ``gap_s`` seconds apart on average, 0 of one that had no gaps."""
        if gap_s and place.quote is not None:
            self._routes.paced(place.served.name, place.quote, gap_s)

    def unseen(self, place: Ticket, link: ReplicaHandle) -> None:
        """Its answer will come whole: its prefill is taken to be over when it was predicted to be."""
        if place.pending and place.quote is not None:
            place.ahead = link.foresee(place.pending, self._clock() + place.quote.total)
            place.pending = 0

    def waited_s(self, model: str) -> float:
        """For how long the one waits that waits the longest for ``model``."""
        line = self._lines.get(model)
        oldest = None if line is None else line.oldest
        return 0.0 if oldest is None else self._clock() - oldest

    def settle(self, place: Ticket, prompt_tokens: int, output_tokens: int) -> None:
        """What it cost in truth, as the engine counted it; in place of what was charged when it began."""
        if place.began is not None:
            place.line.queue.settle(place.began, prompt_tokens + output_tokens)
        self._routes.counted(place.request, prompt_tokens, output_tokens)

    def pump(self, model: str) -> None:
        """A replica of ``model`` has news: hand out what capacity there is."""
        line = self._lines.get(model)
        if line is not None and line.queue.waiting and self._clock() - line.rested_at >= REST_S:
            self._pump_soon(line)

    def dismiss(self, model: str) -> None:
        """No replica of ``model`` serves and none is on its way: who waits for one waits in vain."""
        line = self._lines.get(model)
        if line is None:
            return
        now = self._clock()
        for place in tuple(line.places.values()):
            line.queue.remove(place.request, now)  # of those that wait: who was granted a replica has left
            self._turned_away.in_vain(place)

    def give_up(self, model: str, adapters: Set[str]) -> None:
        """A replica of ``model`` could not load ``adapters``: to wait for one that none can is in vain."""
        line = self._lines.get(model)
        if line is None:
            return
        now = self._clock()
        for place in tuple(line.places.values()):
            request = place.request
            if request.adapter in adapters and place.served.cannot_load(request.adapter):
                line.queue.remove(request, now)
                self._turned_away.cannot_load(place)

    def has_other(self, place: Ticket) -> bool:
        """Whether a replica that has not failed this request could take it now."""
        return any(
            link.admissible and link.id not in place.request.avoid and link.serves(place.request.adapter)
            for link in place.served.links
        )

    def _line(self, served: ServedModel) -> ModelQueue:
        def fair() -> FairQueue:
            return FairQueue(
                self._weight, None if self._shared is LOCAL else QueuePort(self._shared, served.name)
            )

        return ModelQueue(served, Queue(fair), ReservedSlots(self._weight), self._shared)

    def _choose(self, place: Ticket) -> ReplicaHandle | None:
        kept = place.line.kept_from(place.request.tenant)
        if kept < 0:
            return None
        chosen = self._routes.choose(place.served, place.request, kept)
        if chosen is None:
            return None
        link, place.quote = chosen
        return link

    def _send(self, place: Ticket, link: ReplicaHandle) -> None:
        assert place.quote is not None
        place.pending = place.quote.uncached
        place.news = self._routes.began(place.request, place.quote)
        link.begin(place.pending)
        place.line.took()
        place.line.reserve.began(place.request.tenant)  # at once: who else is picked with it depends on it
        if place.request.adapter:
            place.line.joins(place.request.adapter, link)

    def _begin(self, place: Ticket, now: float) -> None:
        place.began = place.line.queue.begin(place.request, now)

    def _wait(self, place: Ticket, now: float) -> None:
        """Stand in the queue; raises :class:`gateway.protocol.errors.Refused` for a newcomer that may not."""
        line, request = place.line, place.request
        line.queue.serve(now, ready=line.up)
        if place.entered:
            line.queue.put_back(request, now)
        else:
            limits = self._deployment().gateway
            patience_s = math.inf
            if request.priority in _PROMISED and (promised_s := self._promised_s(line)) is not None:
                patience_s = START_SHARE * promised_s
                # The promise is of those that serve: a start takes its time however few ask.
                if request.priority is Priority.SHEDDABLE and not line.served.down:
                    request.deadline = min(request.deadline, request.arrived + promised_s)
            if line.queue.unsure:
                line.queue.expect(self._routes.stays_s(line.served, request))
            elsewhere = sum(other.queue.size for other in self._lines.values() if other is not line)
            # A body that is larger than all may be waits where nothing else does, of any model.
            size = limits.max_queue_bytes - elsewhere if elsewhere or line.queue else request.size
            verdict = line.queue.enter(
                request,
                Bounds(limits.max_queue, size),
                now,
                patience_s=patience_s,
                full=not line.has_room,
                kept=line.keeps_for(request.tenant),
            )
            for displaced in verdict.displaced:
                self._turned_away.displace(line.places[displaced.ticket], verdict.retry_after_s)
            if verdict.refusal is not None:
                raise self._turned_away.newcomer(place, verdict.refusal, verdict.retry_after_s)
            place.entered = True
            place.foreseen_s = verdict.wait_s
        line.waits(place)
        self._depths(line)
        self._arm(line, now)
        self._pump_soon(line)

    def _promised_s(self, line: ModelQueue) -> float | None:
        """The time to the first token that requests of the model are promised, in seconds."""
        try:
            return self._deployment().model(line.served.name).control.slo.ttft_p95_s
        except TargetError:  # a model that the controller still has and the document has not
            return None

    def _pump_soon(self, line: ModelQueue) -> None:
        # Requests that end in one step of an engine free their slots together: choose for all of them.
        if line.pump is None:
            line.pump = self._loop.call_soon(self._pump, line)

    def _pump(self, line: ModelQueue) -> None:
        """Hand out what capacity there is."""
        line.pump = None
        queue = line.queue
        now = self._clock()
        queue.serve(now, ready=line.up)
        if not queue or not line.has_room or line.is_theirs(now):
            return
        links = {link.id: link for link in line.served.links}

        def quote(request: Request) -> CostEstimate | None:
            place = line.places[request.ticket]
            left = place.granted is None or place.granted.done()
            return None if left or not line.has_room or self._choose(place) is None else place.quote

        def could(request: Request, candidate: Candidate) -> bool:
            return links[candidate.id].serves(request.adapter)

        def runs(candidate: Candidate) -> Container[str]:
            return {"", *line.runs.get(candidate.id, ())}

        picks = []
        for pick in dispatch(line.granted(), FreeSlots(quote, could, runs)):
            self._send(line.places[pick.request.ticket], links[pick.quote.candidate.id])
            picks.append(pick)
        meter = self._metrics.queues.model(line.served.name)
        for pick in picks:
            place = line.places[pick.request.ticket]
            self._begin(place, now)
            for passed in pick.passed:
                queue.pass_by(passed)
            meter.waited_for(now - place.request.arrived, place.foreseen_s)
            assert place.granted is not None
            place.granted.set_result(links[pick.quote.candidate.id])
        if not picks:
            line.rested_at = now
        self._depths(line)

    def _depths(self, line: ModelQueue) -> None:
        """Publish who waits."""
        meter = self._metrics.queues.model(line.served.name)
        for priority in meter.depth:
            meter.depth[priority] = line.queue.depth(priority)
        meter.size = line.queue.size

    def _arm(self, line: ModelQueue, now: float) -> None:
        """Wake at the next deadline; and, while a replica is up, with the next tick."""
        at = line.queue.next_deadline()
        if at is None:
            return
        if line.queue.ready:
            at = min(at, now + TICK_S)
        if line.timer is not None:
            if line.timer.when() <= at:
                return
            line.timer.cancel()
        line.timer = self._loop.call_at(at, self._wake, line)

    def _wake(self, line: ModelQueue) -> None:
        line.timer = None
        # The timer's clock has a coarser tick than the deadline, and may fire a hair early.
        now = self._clock()
        for request in line.queue.expire(now + 0.002):
            place = line.places[request.ticket]
            if place.granted is not None and not place.granted.done():
                place.granted.set_exception(self._turned_away.expired(place))
        line.queue.hear_peers()
        self._pump(line)
        self._arm(line, now)
