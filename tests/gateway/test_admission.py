"""How much may wait: by number for each model, by bytes for the worker, and both only on arrival."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.admission import MAX_WAITING_BYTES, Admission, Place
from gateway.errors import Refused
from gateway.fleet import FleetView, Served
from gateway.metrics import Metrics
from gateway.replicas import Link
from gateway.router import Routes
from policy.errors import Refusal
from policy.request import Request
from policy.types import Load, Replica, ReplicaState

WAIT_S = 60.0


class Hall:
    """Models with one replica each that takes one request, and the requests that came."""

    def __init__(self, max_queue: int = 1024) -> None:
        metrics = Metrics()
        self.admission = Admission(
            FleetView("", metrics),
            metrics,
            Routes(random.Random(1)),  # noqa: S311 - ties, not secrets
            lambda: max_queue,
        )
        self.alpha, self.beta = self._model("alpha"), self._model("beta")

    def _model(self, name: str) -> Served:
        served = Served(name)
        load = Load(at=0.0, bound=1)
        link = Link(
            Replica(
                id=name,
                model=name,
                shape="s",
                generation=1,
                state=ReplicaState.READY,
                load=load,
                url="http://r:1",
            ),
            1.0,
            None,
        )
        link.answering = True
        served.links.append(link)
        return served

    def arrive(self, served: Served, size: int = 1) -> Place:
        deadline = asyncio.get_running_loop().time() + WAIT_S
        return self.admission.arrive(served, Request(served.name, size=size, deadline=deadline))

    async def ask(self, place: Place) -> asyncio.Task[Link]:
        asked = asyncio.create_task(self.admission.admit(place))
        await asyncio.sleep(0)
        return asked

    async def fill(self, served: Served) -> Place:
        """A request that has the only slot."""
        place = self.arrive(served)
        await self.admission.admit(place)
        return place


async def leave(asked: asyncio.Task[Link]) -> None:
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked


async def test_whoever_was_sent_back_needs_no_room_in_the_queue() -> None:
    hall = Hall(max_queue=1)
    link = hall.alpha.links[0]
    first = await hall.fill(hall.alpha)
    later = await hall.ask(hall.arrive(hall.alpha))
    link.refused(Refusal.BUSY)
    hall.admission.release(hall.alpha, link)
    again = await hall.ask(first)
    assert not again.done()
    with pytest.raises(Refused, match="already wait"):
        await hall.admission.admit(hall.arrive(hall.alpha))
    link.full = False
    hall.admission.pump("alpha")
    assert await again is link
    assert not later.done()
    await leave(later)


async def test_the_bytes_that_wait_are_bounded_over_all_models() -> None:
    hall = Hall()
    await hall.fill(hall.alpha)
    await hall.fill(hall.beta)
    waits = await hall.ask(hall.arrive(hall.alpha, MAX_WAITING_BYTES - 10))
    fits = await hall.ask(hall.arrive(hall.beta, 10))
    with pytest.raises(Refused) as refused:
        await hall.admission.admit(hall.arrive(hall.beta, 1))
    assert refused.value.reason is Refusal.QUEUE_FULL
    await leave(waits)
    now_fits = await hall.ask(hall.arrive(hall.beta, 1))
    assert not now_fits.done()
    for asked in (fits, now_fits):
        await leave(asked)


async def test_what_a_replica_took_waits_no_more() -> None:
    hall = Hall()
    link = hall.alpha.links[0]
    await hall.fill(hall.alpha)
    waits = await hall.ask(hall.arrive(hall.alpha, MAX_WAITING_BYTES))
    hall.admission.release(hall.alpha, link)
    await waits
    next_one = await hall.ask(hall.arrive(hall.alpha, MAX_WAITING_BYTES))
    assert not next_one.done()
    await leave(next_one)


async def test_whoever_was_sent_back_needs_no_room_for_its_bytes() -> None:
    hall = Hall()
    link = hall.alpha.links[0]
    first = hall.arrive(hall.alpha, MAX_WAITING_BYTES)
    await hall.admission.admit(first)
    later = await hall.ask(hall.arrive(hall.alpha, MAX_WAITING_BYTES))
    link.refused(Refusal.BUSY)
    hall.admission.release(hall.alpha, link)
    again = await hall.ask(first)
    assert not again.done()
    for asked in (again, later):
        await leave(asked)


async def test_one_body_over_the_bound_waits_where_nothing_else_does() -> None:
    hall = Hall()
    await hall.fill(hall.alpha)
    asked = await hall.ask(hall.arrive(hall.alpha, 2 * MAX_WAITING_BYTES))
    assert not asked.done()
    await leave(asked)
