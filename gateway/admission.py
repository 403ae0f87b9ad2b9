"""Who may go to a replica now, who waits, and who is sent away: one queue for each model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import Refused
from gateway.fleet import FleetView, Served
from gateway.metrics import Metrics
from gateway.replicas import Link
from gateway.router import Routes
from policy.errors import Refusal
from policy.request import Request
from policy.routing import Quote
from policy.waiting import Waiting

# What waits is held in memory: without a bound it were max_queue bodies of max_body_bytes, 16 GiB by
# their defaults. Of chats of 8 KiB this holds 32,768, so that max_queue speaks first.
MAX_WAITING_BYTES = 256 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Place:
    """A request's place in the queue of its model.

    ``entered`` once it was found to fit: what is sent back later is not asked again. ``quote`` is what
    was predicted for the replica that it was sent to last.
    """

    served: Served
    request: Request
    entered: bool = False
    quote: Quote | None = None
    granted: asyncio.Future[Link] | None = None


class _Queue:
    def __init__(self) -> None:
        self.waiting: Waiting[Place] = Waiting()
        self.timer: asyncio.TimerHandle | None = None


class Admission:
    """Late binding: a request waits here, not in a replica, while none can take it."""

    def __init__(
        self, fleet: FleetView, metrics: Metrics, routes: Routes, max_queue: Callable[[], int]
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._routes = routes
        self._max_queue = max_queue
        self._queues: dict[str, _Queue] = {}
        self._waiting_bytes = 0
        fleet.on_capacity = self.pump

    def arrive(self, served: Served, request: Request) -> Place:
        """A place at the end of the model's queue."""
        request.ticket = self._queue(served.name).waiting.ticket()
        return Place(served, request)

    async def admit(self, place: Place) -> Link:
        """The replica to send it to, with its slot taken (:meth:`Link.begin`).

        Asking again after a refusal stands in the old place, however full the queue has become.
        Raises :class:`gateway.errors.Refused` when the queue is full or the deadline passes.
        """
        queue = self._queue(place.served.name)
        # Whoever waits came earlier, unless this one was only sent back to its old place.
        if not queue.waiting and (link := self._choose(place)) is not None:
            place.entered = True
            self._send(place, link)
            return link
        if not place.entered:
            self._check_room(place, queue)
            place.entered = True
        loop = asyncio.get_running_loop()
        if place.request.deadline <= loop.time():
            raise self._expired(place)
        place.granted = loop.create_future()
        queue.waiting.put(place.request.ticket, place, place.request.deadline)
        self._waiting_bytes += place.request.size
        self._changed(place.served.name, queue)
        self.pump(place.served.name)
        try:
            return await place.granted
        except asyncio.CancelledError:
            if not queue.waiting.remove(place.request.ticket) and _was_granted(place.granted):
                self.release(place.served, place.granted.result())
            raise
        finally:
            self._waiting_bytes -= place.request.size
            self._changed(place.served.name, queue)

    def release(self, served: Served, link: Link) -> None:
        """A request ended on ``link``: its slot is free."""
        link.end()
        if (queue := self._queues.get(served.name)) is not None and queue.waiting:
            self.pump(served.name)

    def pump(self, model: str) -> None:
        """Hand out what capacity there is, the oldest first."""
        queue = self._queues.get(model)
        if queue is None or not queue.waiting:
            return
        for ticket, place in queue.waiting.in_order():
            link = self._choose(place)
            if link is None:
                if not place.request.adapter:
                    break
                continue  # the adapter is elsewhere; who comes after may still fit
            queue.waiting.remove(ticket)
            assert place.granted is not None
            if place.granted.done():
                continue
            self._send(place, link)
            place.granted.set_result(link)
        self._changed(model, queue)

    def has_other(self, place: Place) -> bool:
        """Whether a replica that has not failed this request could take it now."""
        return any(
            link.admissible
            and link.id not in place.request.avoid
            and (not place.request.adapter or place.request.adapter in link.adapters)
            for link in place.served.links
        )

    def _check_room(self, place: Place, queue: _Queue) -> None:
        if len(queue.waiting) >= self._max_queue():
            raise Refused(
                Refusal.QUEUE_FULL, f"{len(queue.waiting)} requests already wait for {place.served.name}."
            )
        # A body that is larger than all may be still waits where nothing else does.
        if self._waiting_bytes and self._waiting_bytes + place.request.size > MAX_WAITING_BYTES:
            raise Refused(
                Refusal.QUEUE_FULL, f"Requests of {self._waiting_bytes} bytes already wait in this gateway."
            )

    def _choose(self, place: Place) -> Link | None:
        chosen = self._routes.choose(place.served, place.request)
        if chosen is None:
            return None
        link, place.quote = chosen
        return link

    def _send(self, place: Place, link: Link) -> None:
        assert place.quote is not None
        link.begin()
        self._routes.began(place.request, place.quote)

    def _queue(self, model: str) -> _Queue:
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = _Queue()
        return queue

    def _changed(self, model: str, queue: _Queue) -> None:
        """Publish the depth and set the timer to the next deadline."""
        self._metrics.model(model).queue_depth = len(queue.waiting)
        if queue.timer is not None:
            queue.timer.cancel()
            queue.timer = None
        if (at := queue.waiting.next_deadline()) is not None:
            loop = asyncio.get_running_loop()
            queue.timer = loop.call_at(at, self._expire, model, queue)

    def _expire(self, model: str, queue: _Queue) -> None:
        # The timer's clock has a coarser tick than the deadline, and may fire a hair early.
        for place in queue.waiting.expire(asyncio.get_running_loop().time() + 0.002):
            if place.granted is not None and not place.granted.done():
                place.granted.set_exception(self._expired(place))
        self._changed(model, queue)

    def _expired(self, place: Place) -> Refused:
        name = place.served.name
        if any(link.admissible for link in place.served.links):
            return Refused(Refusal.DEADLINE, f"No replica of {name} had room before the request's deadline.")
        return Refused(Refusal.NO_REPLICA, f"No replica of {name} was ready before the request's deadline.")


def _was_granted(granted: asyncio.Future[Link]) -> bool:
    return granted.done() and not granted.cancelled() and granted.exception() is None
