"""The queues of a worker over replica handles without a network: bounds, order, charges and deadlines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.protocol.errors import Refused
from gateway.queue.dispatcher_driver import Ticket
from gateway.queue.model_queues import Admission
from gateway.routing.fleet import ServedModel
from gateway.routing.replica_handle import ReplicaHandle
from gateway.routing.shared_counters import LOCAL, SharedCounts, SharedRows
from gateway.routing.worker_routers import ModelRouters
from gateway.telemetry.metrics import Metrics
from policy.admission.retry import AttemptOutcome
from policy.config.control import ControlConfig, SloConfig
from policy.config.deployment import Deployment, GatewayConfig, ModelSpec
from policy.errors import Refusal
from policy.hashing import hash_name
from policy.request import Request
from policy.types import Load, Priority
from tests.gateway.fake_replica import ready_replica

WAIT_S = 60.0
MAX_BYTES = 10_000


class Hall:
    """Models with one replica each that takes ``bound`` requests, and the requests that came."""

    def __init__(
        self,
        max_queue: int = 1024,
        *,
        bound: int = 1,
        ttft_s: float | None = None,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        shared: SharedCounts = LOCAL,
    ) -> None:
        self._shared = shared
        self.metrics = Metrics()
        slo = ControlConfig(slo=SloConfig(ttft_p95_s=ttft_s))
        deployment = Deployment(
            models=(ModelSpec(name="alpha", control=slo), ModelSpec(name="beta", control=slo)),
            gateway=GatewayConfig(max_queue=max_queue, max_queue_bytes=MAX_BYTES),
        )
        self.admission = Admission(
            self.metrics,
            ModelRouters(random.Random(1)),  # noqa: S311 - ties, not secrets
            lambda: deployment,
            weight=weight,
            shared=shared,
        )
        self.bound = bound
        self.alpha, self.beta = self._model("alpha"), self._model("beta")

    def _model(self, name: str) -> ServedModel:
        served = ServedModel(name)
        replica = ready_replica(name, name, load=Load(at=0.0, bound=self.bound))
        handle = ReplicaHandle(replica, 1.0, None, self._shared)
        handle.answering = True
        served.handles.append(handle)
        return served

    def arrive(self, served: ServedModel, size: int = 1, **more: Any) -> Ticket:
        now = asyncio.get_running_loop().time()
        request = Request(served.name, size=size, **{"arrived": now, "deadline": now + WAIT_S, **more})
        return self.admission.ticket(served, request)

    async def ask(self, place: Ticket) -> asyncio.Task[ReplicaHandle]:
        asked = asyncio.create_task(place.wait())
        await settled()
        return asked

    async def fill(self, served: ServedModel, **more: Any) -> Ticket:
        """A request that has a slot."""
        place = self.arrive(served, **more)
        await place.wait()
        return place

    def depth(self, priority: Priority = Priority.STANDARD) -> int:
        return self.metrics.model("alpha").queue.depth[priority]


async def settled() -> None:
    """Let everything run that can run without waiting."""
    for _ in range(4):
        await asyncio.sleep(0)


def end(ticket: Ticket, outcome: AttemptOutcome = AttemptOutcome.SERVED, *tokens: int) -> None:
    counted = (tokens[0], tokens[1]) if tokens else None
    ticket.end(asyncio.get_running_loop().time(), outcome, counted)


async def leave(*asked: asyncio.Task[ReplicaHandle]) -> None:
    for one in asked:
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one


async def test_whoever_was_sent_back_needs_no_room_in_the_queue() -> None:
    hall = Hall(max_queue=1)
    handle = hall.alpha.handles[0]
    first = await hall.fill(hall.alpha, size=MAX_BYTES)
    later = await hall.ask(hall.arrive(hall.alpha, MAX_BYTES))
    handle.refused(Refusal.BUSY)
    end(first, AttemptOutcome.REFUSED)
    again = await hall.ask(first)
    assert not again.done()
    with pytest.raises(Refused, match="already wait"):
        await hall.arrive(hall.alpha).wait()
    handle.full = False
    await asyncio.sleep(0.005)  # its word is heard at most every few milliseconds
    hall.admission.replica_changed("alpha")
    assert await again is handle
    assert not later.done()
    await leave(later)


async def test_the_bytes_that_wait_are_bounded_over_all_models() -> None:
    hall = Hall()
    await hall.fill(hall.alpha)
    await hall.fill(hall.beta)
    waits = await hall.ask(hall.arrive(hall.alpha, MAX_BYTES - 10))
    fits = await hall.ask(hall.arrive(hall.beta, 10))
    with pytest.raises(Refused) as refused:
        await hall.arrive(hall.beta, 1).wait()
    assert refused.value.reason is Refusal.QUEUE_FULL
    assert hall.metrics.model("beta").queue.refused[Refusal.QUEUE_FULL] == 1
    await leave(waits)
    now_fits = await hall.ask(hall.arrive(hall.beta, 1))
    assert not now_fits.done()
    await leave(fits, now_fits)


async def test_what_a_replica_took_waits_no_more() -> None:
    hall = Hall()
    first = await hall.fill(hall.alpha)
    waits = await hall.ask(hall.arrive(hall.alpha, MAX_BYTES))
    end(first)
    await waits
    next_one = await hall.ask(hall.arrive(hall.alpha, MAX_BYTES))
    assert not next_one.done()
    await leave(next_one)


async def test_one_body_over_the_bound_waits_where_nothing_else_does() -> None:
    hall = Hall()
    await hall.fill(hall.alpha)
    asked = await hall.ask(hall.arrive(hall.alpha, 2 * MAX_BYTES))
    assert not asked.done()
    await leave(asked)


async def test_the_slots_that_free_together_go_to_the_first_in_the_fair_order() -> None:
    hall = Hall(bound=2)
    holders = [await hall.fill(hall.alpha, tenant="loud", prompt_tokens=10) for _ in range(2)]
    loud = [await hall.ask(hall.arrive(hall.alpha, tenant="loud", prompt_tokens=10)) for _ in range(4)]
    quiet = await hall.ask(hall.arrive(hall.alpha, tenant="quiet", prompt_tokens=10))
    for holder in holders:
        end(holder)
    await settled()
    assert quiet.done()
    assert [one.done() for one in loud] == [True, False, False, False]
    await leave(*loud[1:])


async def test_whoever_leaves_as_it_is_admitted_gives_the_slot_back() -> None:
    hall = Hall()
    handle = hall.alpha.handles[0]
    first = await hall.fill(hall.alpha)
    leaves = await hall.ask(hall.arrive(hall.alpha))
    next_one = await hall.ask(hall.arrive(hall.alpha))
    end(first)
    await asyncio.sleep(0)  # granted, but not told yet
    await leave(leaves)
    assert await next_one is handle
    assert handle.mine == 1


async def test_a_full_queue_turns_out_the_least_important() -> None:
    hall = Hall(max_queue=1)
    await hall.fill(hall.alpha)
    batch = await hall.ask(hall.arrive(hall.alpha, priority=Priority.BATCH))
    critical = await hall.ask(hall.arrive(hall.alpha, priority=Priority.CRITICAL))
    with pytest.raises(Refused) as refused:
        await batch
    assert (refused.value.reason, refused.value.status) == (Refusal.QUEUE_FULL, 429)
    assert refused.value.retry_after_s is not None
    assert hall.metrics.model("alpha").queue.displaced == 1
    assert (hall.depth(Priority.BATCH), hall.depth(Priority.CRITICAL)) == (0, 1)
    await leave(critical)
    assert hall.depth(Priority.CRITICAL) == 0


async def test_what_can_be_shed_waits_no_longer_than_was_promised() -> None:
    hall = Hall(ttft_s=0.05)
    await hall.fill(hall.alpha)
    standard = await hall.ask(hall.arrive(hall.alpha))
    with pytest.raises(Refused) as refused:
        await hall.arrive(hall.alpha, priority=Priority.SHEDDABLE).wait()
    assert refused.value.reason is Refusal.DEADLINE
    assert not standard.done()
    await leave(standard)


async def test_what_can_be_shed_waits_for_a_start_as_long_as_it_would() -> None:
    hall = Hall(ttft_s=0.01)
    hall.alpha.handles.clear()
    hall.alpha.down = hall.alpha.asleep = True
    asked = await hall.ask(hall.arrive(hall.alpha, priority=Priority.SHEDDABLE))
    await asyncio.sleep(0.03)
    assert not asked.done()
    hall.alpha.handles.append(hall.beta.handles[0])
    hall.admission.replica_changed("alpha")
    assert await asked is hall.beta.handles[0]


async def test_who_waits_for_a_model_at_zero_waits_to_its_deadline() -> None:
    hall = Hall()
    hall.alpha.handles.clear()
    hall.alpha.down = hall.alpha.asleep = True
    now = asyncio.get_running_loop().time()
    asked = await hall.ask(hall.arrive(hall.alpha, deadline=now + 0.02))
    await asyncio.wait_for(hall.admission.woken.wait(), 1)
    assert not asked.done()
    with pytest.raises(Refused) as refused:
        await asked
    assert refused.value.reason is Refusal.NO_REPLICA
    assert asyncio.get_running_loop().time() >= now + 0.017


async def test_who_could_not_be_served_in_time_is_refused_before_it_waits() -> None:
    hall = Hall()
    first = await hall.fill(hall.alpha)
    await asyncio.sleep(0.02)
    end(first)
    await hall.fill(hall.alpha)
    waits = await hall.ask(hall.arrive(hall.alpha))
    now = asyncio.get_running_loop().time()
    late = hall.arrive(hall.alpha, deadline=now + 0.005)
    with pytest.raises(Refused) as refused:
        await late.wait()
    assert (refused.value.reason, refused.value.status) == (Refusal.OVERLOADED, 503)
    assert refused.value.retry_after_s == 1
    await leave(waits)


@pytest.mark.parametrize(
    ("outcome", "tokens", "first"),
    [
        (AttemptOutcome.REFUSED, (), True),
        (AttemptOutcome.SERVED, (1, 1), True),
        (AttemptOutcome.SERVED, (), False),
        (AttemptOutcome.SERVED, (400, 400), False),
    ],
    ids=["refused: uncharged", "cheaper than estimated", "estimate", "as the engine counted"],
)
async def test_a_tenant_is_charged_what_its_requests_cost(
    outcome: AttemptOutcome, tokens: tuple[int, ...], *, first: bool
) -> None:
    hall = Hall()
    end(await hall.fill(hall.alpha, tenant="b", prompt_tokens=100))
    end(await hall.fill(hall.alpha, tenant="a", prompt_tokens=500), outcome, *tokens)
    holder = await hall.fill(hall.alpha, tenant="c")
    waits = [await hall.ask(hall.arrive(hall.alpha, tenant=tenant)) for tenant in "ba"]
    end(holder)
    await settled()
    assert [task.done() for task in waits] == [not first, first]
    await leave(waits[not first])


async def test_time_alone_may_make_room() -> None:
    hall = Hall()
    handle = hall.alpha.handles[0]
    handle.count(b'{"state": "ready", "load": {"at": 0, "in_flight": 1, "bound": 1}}', 0.0)
    asked = await hall.ask(hall.arrive(hall.alpha))
    assert not asked.done()
    handle.count(b'{"state": "ready", "load": {"at": 0, "in_flight": 0, "bound": 1}}', 0.0)
    assert await asyncio.wait_for(asked, WAIT_S) is handle


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[tuple[SharedRows, SharedRows]]:
    """The memory of two workers of a host."""
    both = SharedRows(tmp_path / "rows", 0), SharedRows(tmp_path / "rows", 1)
    for row in both:
        row.beat()
    yield both
    for row in both:
        row.close()


async def test_a_slot_goes_to_the_worker_with_less_than_its_part(rows: tuple[SharedRows, SharedRows]) -> None:
    one, other = (Hall(bound=2, shared=row) for row in rows)
    running = [await one.fill(one.alpha) for _ in range(2)]
    waiting = [await one.ask(one.arrive(one.alpha)) for _ in range(2)]
    there = [await other.ask(other.arrive(other.alpha)) for _ in range(2)]
    for row in rows:
        row.beat()
    # The worker in which it ended is the first to know, and has one that still runs.
    end(running[0])
    await asyncio.wait({*there, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert [task.done() for task in there] == [True, False]
    assert not any(task.done() for task in waiting)
    # Now each has one.
    for row in rows:
        row.beat()
    end(running[1])
    await asyncio.wait({*waiting, there[1]}, return_when=asyncio.FIRST_COMPLETED)
    assert waiting[0].done()
    assert not there[1].done()
    await leave(waiting[1], there[1])


async def test_who_has_no_use_for_a_slot_keeps_nobody_from_it(rows: tuple[SharedRows, SharedRows]) -> None:
    hall = Hall(bound=2, shared=rows[0])
    running = [await hall.fill(hall.alpha) for _ in range(2)]
    rows[1].begin(hash_name("waits for alpha"), 0)
    rows[0].beat()
    waits = await hall.ask(hall.arrive(hall.alpha))
    end(running[0])
    await settled()
    assert not waits.done()
    assert await waits is hall.alpha.handles[0]


def test_requests_that_come_in_the_instant_of_a_deadline_are_told_of_it() -> None:
    """uvloop counts in whole milliseconds: a shorter timer is none to it."""

    async def scene() -> list[Any]:
        hall = Hall()
        await hall.fill(hall.alpha)

        async def ask() -> None:
            soon = asyncio.get_running_loop().time() + 0.0003
            await hall.arrive(hall.alpha, deadline=soon).wait()

        return await asyncio.gather(ask(), ask(), return_exceptions=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        refused = runner.run(scene())
    assert [each.reason for each in refused] == [Refusal.DEADLINE] * 2
