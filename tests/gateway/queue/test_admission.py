"""The queues of a worker over replica handles without a network: bounds, order, charges and deadlines."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.protocol.errors import Refused
from gateway.queue.admission import Admission
from gateway.queue.model_queue import REST_S, QueueTicket
from gateway.routing.fleet import ServedModel
from gateway.routing.model_routers import ModelRouters
from gateway.routing.replica_handle import ReplicaHandle
from gateway.routing.shared_counters import LOCAL, SharedCounts, SharedRows
from gateway.telemetry.metrics import WorkerMetrics
from policy.admission.dispatcher import MOST_GRANTED
from policy.admission.retry_policy import AttemptOutcome
from policy.config.control import ControlConfig, SloConfig
from policy.config.deployment import Deployment, GatewayConfig, ModelSpec
from policy.engine.performance_model import BatchLimits, EngineModel, Timing
from policy.errors import Refusal
from policy.request import Request
from policy.types import Priority, ReplicaLoad, Runner
from tests.gateway.fake_replica import ready_replica
from tests.gateway.virtual_time import run_virtual

WAIT_S = 60.0
# Steps of 10 ms, whatever runs.
TIMING = Timing(
    limits=BatchLimits(max_num_batched_tokens=8192, max_num_seqs=64, kv_tokens=1_000_000),
    model=EngineModel(o=0.01, w=0.0, c=1e-7, g=0.0, r=0.0),
)
MAX_BYTES = 10_000


class Queues:
    """Models with ``replicas`` each that take ``bound`` requests, and their requests."""

    def __init__(
        self,
        max_queue: int = 1024,
        *,
        bound: int = 1,
        replicas: int = 1,
        ttft_s: float | None = None,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        shared: SharedCounts = LOCAL,
        rng: random.Random | None = None,
    ) -> None:
        self._shared = shared
        self.metrics = WorkerMetrics()
        slo = ControlConfig(slo=SloConfig(ttft_p95_s=ttft_s))
        deployment = Deployment(
            models=(ModelSpec(name="alpha", control=slo), ModelSpec(name="beta", control=slo)),
            gateway=GatewayConfig(max_queue=max_queue, max_queue_bytes=MAX_BYTES),
        )
        self.admission = Admission(
            self.metrics,
            ModelRouters(rng or random.Random(1)),  # noqa: S311 - ties, not secrets
            lambda: deployment,
            weight=weight,
            shared=shared,
        )
        self.alpha, self.beta = (self._model(name, bound, replicas) for name in ("alpha", "beta"))

    def _model(self, name: str, bound: int, replicas: int) -> ServedModel:
        served = ServedModel(name)
        for i in range(replicas):
            replica = ready_replica(f"{name}{i}", name, load=ReplicaLoad(at=0.0, bound=bound))
            handle = ReplicaHandle(replica, 1.0, None, self._shared, served.health)
            handle.answering = True
            served.handles.append(handle)
        return served

    def arrive(self, served: ServedModel, size: int = 1, **more: Any) -> QueueTicket:
        now = asyncio.get_running_loop().time()
        request = Request(served.name, size=size, **{"arrived": now, "deadline": now + WAIT_S, **more})
        return self.admission.ticket(served, request)

    async def ask(self, ticket: QueueTicket) -> asyncio.Task[ReplicaHandle]:
        asked = asyncio.create_task(ticket.wait())
        await settled()
        return asked

    async def fill(self, served: ServedModel, **more: Any) -> QueueTicket:
        """A request that has a slot."""
        ticket = self.arrive(served, **more)
        await ticket.wait()
        return ticket

    def depth(self, priority: Priority = Priority.STANDARD) -> int:
        return self.metrics.model("alpha").queue.depth[priority]


async def settled() -> None:
    """Let everything run that can run without waiting."""
    for _ in range(4):
        await asyncio.sleep(0)


def end(ticket: QueueTicket, outcome: AttemptOutcome = AttemptOutcome.SERVED, *tokens: int) -> None:
    counted = (tokens[0], tokens[1]) if tokens else None
    ticket.end(asyncio.get_running_loop().time(), outcome, counted)


async def leave(*asked: asyncio.Task[ReplicaHandle]) -> None:
    for one in asked:
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one


async def test_a_returned_request_keeps_its_place_in_a_full_queue() -> None:
    queues = Queues(max_queue=1)
    handle = queues.alpha.handles[0]
    first = await queues.fill(queues.alpha, size=MAX_BYTES)
    later = await queues.ask(queues.arrive(queues.alpha, MAX_BYTES))
    handle.refused(Refusal.BUSY)
    end(first, AttemptOutcome.REFUSED)
    again = await queues.ask(first)
    assert not again.done()
    with pytest.raises(Refused, match="already wait"):
        await queues.arrive(queues.alpha).wait()
    handle.full = False
    await asyncio.sleep(0.005)  # it is read at most every few milliseconds
    queues.admission.replica_changed("alpha")
    assert await again is handle
    assert not later.done()
    await leave(later)


async def test_queued_bytes_are_limited_over_all_models() -> None:
    queues = Queues()
    await queues.fill(queues.alpha)
    await queues.fill(queues.beta)
    waits = await queues.ask(queues.arrive(queues.alpha, MAX_BYTES - 10))
    fits = await queues.ask(queues.arrive(queues.beta, 10))
    with pytest.raises(Refused) as refused:
        await queues.arrive(queues.beta, 1).wait()
    assert refused.value.reason is Refusal.QUEUE_FULL
    assert queues.metrics.model("beta").queue.refused[Refusal.QUEUE_FULL] == 1
    await leave(waits)
    now_fits = await queues.ask(queues.arrive(queues.beta, 1))
    assert not now_fits.done()
    await leave(fits, now_fits)


async def test_admitted_requests_do_not_count_as_queued_bytes() -> None:
    queues = Queues()
    first = await queues.fill(queues.alpha)
    waits = await queues.ask(queues.arrive(queues.alpha, MAX_BYTES))
    end(first)
    await waits
    next_one = await queues.ask(queues.arrive(queues.alpha, MAX_BYTES))
    assert not next_one.done()
    await leave(next_one)


async def test_a_body_over_the_limit_may_wait_in_an_empty_queue() -> None:
    queues = Queues()
    await queues.fill(queues.alpha)
    asked = await queues.ask(queues.arrive(queues.alpha, 2 * MAX_BYTES))
    assert not asked.done()
    await leave(asked)


async def test_slots_freed_together_are_granted_in_fair_order() -> None:
    queues = Queues(bound=2)
    holders = [await queues.fill(queues.alpha, tenant="busy", prompt_tokens=10) for _ in range(2)]
    busy = [await queues.ask(queues.arrive(queues.alpha, tenant="busy", prompt_tokens=10)) for _ in range(4)]
    quiet = await queues.ask(queues.arrive(queues.alpha, tenant="quiet", prompt_tokens=10))
    for holder in holders:
        end(holder)
    await settled()
    assert quiet.done()
    assert [one.done() for one in busy] == [True, False, False, False]
    await leave(*busy[1:])


def test_requests_for_which_slots_fall_free_together_begin_over_several_turns() -> None:
    async def main() -> None:
        queues = Queues()
        await queues.fill(queues.alpha)
        asked = [asyncio.create_task(queues.arrive(queues.alpha).wait()) for _ in range(2 * MOST_GRANTED + 2)]
        await settled()
        handle = queues.alpha.handles[0]
        handle.view.bound = len(asked) + 1
        await asyncio.sleep(REST_S)
        before = handle.in_flight
        queues.admission.replica_changed("alpha")
        begun = [before]
        while begun[-1] <= len(asked):
            await asyncio.sleep(0)
            begun.append(handle.in_flight)
        assert max(after - before for before, after in itertools.pairwise(begun)) == MOST_GRANTED
        await asyncio.gather(*asked)

    run_virtual(main)  # no timer offers slots meanwhile


async def test_no_request_is_refused_for_a_service_time_that_nothing_confirms() -> None:
    """Neither the replica nor the deployment says how fast it is, and no answer has ended."""
    queues = Queues(bound=5, ttft_s=1.0)
    asked = [await queues.ask(queues.arrive(queues.alpha, output_tokens=128)) for _ in range(90)]
    assert [one.done() for one in asked] == [True] * 5 + [False] * 85
    await leave(*asked[5:])


async def test_requests_for_a_full_replicas_adapter_delay_no_others() -> None:
    queues = Queues(bound=1, replicas=2)
    queues.alpha.handles[1].adapters.update(("x",), ())
    more = {"adapter": "x", "adapter_key": 1, "priority": Priority.CRITICAL}
    await queues.fill(queues.alpha, **more)
    waiting = [await queues.ask(queues.arrive(queues.alpha, **more)) for _ in range(600)]
    fits = await queues.ask(queues.arrive(queues.alpha, priority=Priority.BATCH))
    assert fits.done()
    assert not any(task.done() for task in waiting)
    await leave(*waiting)


async def test_one_waiting_request_probes_a_replica_that_was_ejected() -> None:
    queues = Queues(bound=4, replicas=2)
    breaker = queues.alpha.handles[0].breaker
    for _ in range(8):
        await queues.fill(queues.alpha)
    for _ in range(4):
        queues.alpha.handles[0].end()
    breaker.open(asyncio.get_running_loop().time(), 0.0)
    waiting = [await queues.ask(queues.arrive(queues.alpha)) for _ in range(2)]
    breaker.half_open()
    queues.admission.replica_changed("alpha")
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    assert [task.done() for task in waiting] == [True, False]
    await leave(waiting[1])


async def test_a_disconnect_at_admission_frees_the_slot() -> None:
    queues = Queues()
    handle = queues.alpha.handles[0]
    first = await queues.fill(queues.alpha)
    cancelled = await queues.ask(queues.arrive(queues.alpha))
    next_one = await queues.ask(queues.arrive(queues.alpha))
    end(first)
    await asyncio.sleep(0)  # granted, but not resumed yet
    await leave(cancelled)
    assert await next_one is handle
    assert handle.mine == 1


async def test_a_full_queue_displaces_the_lowest_priority() -> None:
    queues = Queues(max_queue=1)
    await queues.fill(queues.alpha)
    batch = await queues.ask(queues.arrive(queues.alpha, priority=Priority.BATCH))
    critical = await queues.ask(queues.arrive(queues.alpha, priority=Priority.CRITICAL))
    with pytest.raises(Refused) as refused:
        await batch
    assert (refused.value.reason, refused.value.status) == (Refusal.QUEUE_FULL, 429)
    assert refused.value.retry_after_s is not None
    assert queues.metrics.model("alpha").queue.displaced == 1
    assert (queues.depth(Priority.BATCH), queues.depth(Priority.CRITICAL)) == (0, 1)
    await leave(critical)
    assert queues.depth(Priority.CRITICAL) == 0


async def test_a_sheddable_request_waits_no_longer_than_the_slo() -> None:
    queues = Queues(ttft_s=0.05)
    await queues.fill(queues.alpha)
    standard = await queues.ask(queues.arrive(queues.alpha))
    with pytest.raises(Refused) as refused:
        await queues.arrive(queues.alpha, priority=Priority.SHEDDABLE).wait()
    assert refused.value.reason is Refusal.DEADLINE
    assert not standard.done()
    await leave(standard)


async def test_a_sheddable_request_waits_for_a_start() -> None:
    queues = Queues(ttft_s=0.01)
    queues.alpha.handles.clear()
    queues.alpha.down = queues.alpha.asleep = True
    asked = await queues.ask(queues.arrive(queues.alpha, priority=Priority.SHEDDABLE))
    await asyncio.sleep(0.03)
    assert not asked.done()
    queues.alpha.handles.append(queues.beta.handles[0])
    queues.admission.replica_changed("alpha")
    assert await asked is queues.beta.handles[0]


def test_a_request_for_a_sleeping_model_waits_to_its_deadline() -> None:
    async def main() -> None:
        queues = Queues()
        queues.alpha.handles.clear()
        queues.alpha.down = queues.alpha.asleep = True
        now = asyncio.get_running_loop().time()
        asked = await queues.ask(queues.arrive(queues.alpha, deadline=now + 0.02))
        await asyncio.wait_for(queues.admission.woken.wait(), 1)
        assert not asked.done()
        with pytest.raises(Refused) as refused:
            await asked
        assert refused.value.reason is Refusal.NO_REPLICA
        assert asyncio.get_running_loop().time() >= now + 0.017

    run_virtual(main)  # the deadline passes at no other moment


async def test_a_request_predicted_to_be_late_is_refused_on_arrival() -> None:
    queues = Queues()
    first = await queues.fill(queues.alpha)
    await asyncio.sleep(0.02)
    end(first)
    await queues.fill(queues.alpha)
    waits = await queues.ask(queues.arrive(queues.alpha))
    now = asyncio.get_running_loop().time()
    late = queues.arrive(queues.alpha, deadline=now + 0.005)
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
async def test_a_tenant_is_charged(outcome: AttemptOutcome, tokens: tuple[int, ...], *, first: bool) -> None:
    queues = Queues()
    end(await queues.fill(queues.alpha, tenant="b", prompt_tokens=100))
    end(await queues.fill(queues.alpha, tenant="a", prompt_tokens=500), outcome, *tokens)
    holder = await queues.fill(queues.alpha, tenant="c")
    waits = [await queues.ask(queues.arrive(queues.alpha, tenant=tenant)) for tenant in "ba"]
    end(holder)
    await settled()
    assert [task.done() for task in waits] == [not first, first]
    await leave(waits[not first])


async def test_a_waiting_request_is_offered_slots_again_by_the_timer() -> None:
    queues = Queues()
    handle = queues.alpha.handles[0]
    handle.count(b'{"state": "ready", "load": {"at": 0, "in_flight": 1, "bound": 1}}', 0.0)
    asked = await queues.ask(queues.arrive(queues.alpha))
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


async def test_a_slot_goes_to_the_worker_below_its_fair_share(rows: tuple[SharedRows, SharedRows]) -> None:
    one, other = (Queues(bound=2, shared=row) for row in rows)
    running = [await one.fill(one.alpha) for _ in range(2)]
    waiting = [await one.ask(one.arrive(one.alpha)) for _ in range(2)]
    there = [await other.ask(other.arrive(other.alpha)) for _ in range(2)]
    for row in rows:
        row.beat()
    # The worker in which it ended knows first, and still runs one request.
    end(running[0])
    await asyncio.wait({*there, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert [task.done() for task in there] == [True, False]
    assert not any(task.done() for task in waiting)
    # Each worker runs one request now.
    for row in rows:
        row.beat()
    end(running[1])
    await asyncio.wait({*waiting, there[1]}, return_when=asyncio.FIRST_COMPLETED)
    assert waiting[0].done()
    assert not there[1].done()
    await leave(waiting[1], there[1])


async def test_a_slot_that_is_left_is_taken_if_no_worker_uses_it(rows: tuple[SharedRows, SharedRows]) -> None:
    queues, others = (Queues(bound=2, shared=row) for row in rows)
    others.alpha.handles[0].answering = False  # that worker cannot reach the replica
    running = [await queues.fill(queues.alpha) for _ in range(2)]
    there = await others.ask(others.arrive(others.alpha))
    rows[0].beat()
    waits = await queues.ask(queues.arrive(queues.alpha))
    end(running[0])
    await settled()
    assert not waits.done()
    assert await waits is queues.alpha.handles[0]
    await leave(there)


async def test_a_slot_that_another_worker_takes_during_a_choice_is_not_taken_twice(
    rows: tuple[SharedRows, SharedRows],
) -> None:
    class Meanwhile(random.Random):
        def random(self) -> float:
            if not taken:
                taken.append(others.arrive(others.alpha))
                taken[0].enter(0.0)
            return super().random()

    taken: list[QueueTicket] = []
    queues, others = Queues(shared=rows[0], rng=Meanwhile()), Queues(shared=rows[1])
    asked = await queues.ask(queues.arrive(queues.alpha))
    assert taken[0].replica is others.alpha.handles[0]
    assert not asked.done()
    end(taken[0])
    assert await asked is queues.alpha.handles[0]


def test_deadlines_below_the_timers_resolution_are_met() -> None:
    """uvloop counts in whole milliseconds: a shorter timer is zero."""

    async def main() -> list[Any]:
        queues = Queues()
        await queues.fill(queues.alpha)

        async def ask() -> None:
            soon = asyncio.get_running_loop().time() + 0.0003
            await queues.arrive(queues.alpha, deadline=soon).wait()

        return await asyncio.gather(ask(), ask(), return_exceptions=True)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        refused = runner.run(main())
    assert [each.reason for each in refused] == [Refusal.DEADLINE] * 2


@pytest.mark.parametrize("closing", [True, False])
async def test_no_request_is_predicted_to_be_late_while_replicas_close_or_give_way(closing: bool) -> None:
    """What waits for the end of a switch begins after it, whatever the rate of those that end before."""
    queues = Queues()
    served = queues.alpha
    first = await queues.fill(served)
    await asyncio.sleep(0.02)
    end(first)
    await queues.fill(served)
    now = asyncio.get_running_loop().time()
    served.layer, served.gives_way = ("other", 2), not closing
    if closing:
        served.closes_at = now + 60.0
    waits = [await queues.ask(queues.arrive(served, deadline=now + 0.25)) for _ in range(50)]
    assert not any(asked.done() for asked in waits)
    for asked in waits:
        await leave(asked)


def test_whole_answers_count_with_the_tokens_that_they_should_have() -> None:
    """A burst of long ones was unseen until the first of them ended."""

    found: list[tuple[int, int]] = []

    async def main() -> None:
        queues = Queues(bound=8)
        served, clock = queues.alpha, asyncio.get_running_loop().time
        served.handles[0].view.timing = TIMING
        stream = await queues.fill(served, prompt_tokens=20, output_tokens=100)
        stream.began(clock())
        for limit_tokens in (0, 300):
            whole = await queues.fill(served, prompt_tokens=20, output_tokens=100, limit_tokens=limit_tokens)
            whole.began(clock(), streams=False)
        queues.beta.runner, queues.beta.handles[0].view.timing = Runner.POOLING, TIMING
        await queues.fill(queues.beta, prompt_tokens=20, output_tokens=1)
        found.append(await queues.admission.whole_answers("alpha"))
        for _ in range(2):
            await asyncio.sleep(10.0)
            found.append(await queues.admission.whole_answers("alpha"))
        served.max_model_len = 1020
        found.append(await queues.admission.whole_answers("alpha"))
        assert await queues.admission.whole_answers("beta") == (0, 0)

    run_virtual(main)
    at_once, soon, later, bounded = found
    assert at_once == (0, 0)
    assert soon == (2, pytest.approx(1000 + 300, rel=0.05))
    assert later == (2, pytest.approx(2000 + 300, rel=0.05))
    assert bounded == (2, 1000 + 300)


async def test_a_replica_that_drains_soon_takes_only_what_ends_before() -> None:
    queues = Queues(bound=4)
    served, at = queues.alpha, asyncio.get_running_loop().time()
    long = {"prompt_tokens": 20, "output_tokens": 2000, "limit_tokens": 2000}
    running = await queues.fill(served, **long)
    drain_s = await queues.admission.drain_s(served.name)
    assert drain_s > 1.0
    served.layer, served.closes_at = ("other", 2), at + 0.5 * drain_s
    waiting = queues.arrive(served, **long)
    asked = await queues.ask(waiting)
    assert not asked.done()
    # It has room, and the one before cannot use it.
    served.closing_since = at + 1e-9
    short = await queues.fill(served, prompt_tokens=20, output_tokens=20)
    end(running)
    assert await queues.admission.drain_s(served.name) == 0.0
    end(short)
    # Replicas of the desired layer stay.
    replica = served.handles[0].replica
    served.layer = (replica.shape, replica.generation)
    queues.admission.replica_changed(served.name)
    await asked
    end(waiting)
