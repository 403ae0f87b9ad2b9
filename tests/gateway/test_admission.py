"""How much may wait, asked only on arrival."""

from __future__ import annotations

import asyncio
import random

import pytest

from gateway.admission import Admission, Place
from gateway.errors import Refused
from gateway.fleet import FleetView, Served
from gateway.metrics import Metrics
from gateway.replicas import Link
from policy.errors import Refusal
from policy.types import Load, Replica, ReplicaState

WAIT_S = 60.0


class Hall:
    """Models with one replica each that takes one request, and the requests that came."""

    def __init__(self, max_queue: int = 1024) -> None:
        metrics = Metrics()
        self.admission = Admission(
            FleetView("", metrics),
            metrics,
            random.Random(1),  # noqa: S311 - ties, not secrets
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

    def arrive(self, served: Served) -> Place:
        deadline = asyncio.get_running_loop().time() + WAIT_S
        return self.admission.arrive(served, None, deadline)

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
