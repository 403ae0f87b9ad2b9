"""Requests that are rejected together are rejected over several turns of the event loop."""

from __future__ import annotations

import asyncio
import itertools

from gateway.protocol.errors import Refused
from gateway.routing.fleet import FleetView, ServedModel
from gateway.routing.fleet_listeners import FleetListeners
from gateway.routing.replica_handle import ReplicaHandle
from policy.admission.dispatcher import MOST_REJECTED
from policy.config.deployment import Deployment, ModelSpec
from policy.errors import Refusal
from policy.types import EngineKind
from tests.gateway.queue.test_admission import Queues, leave, settled
from tests.gateway.virtual_time import VirtualLoop, run_virtual

WAITING = 2 * MOST_REJECTED + 10


async def crowd(
    queues: Queues, adapter: str = "", *, running: bool = True
) -> list[asyncio.Task[ReplicaHandle]]:
    """Requests that wait, all with a deadline in a minute, beside one that runs."""
    if running:
        await queues.fill(queues.alpha)
    deadline = asyncio.get_running_loop().time() + 60.0
    tickets = [queues.arrive(queues.alpha, deadline=deadline, adapter=adapter) for _ in range(WAITING)]
    asked = [asyncio.create_task(ticket.wait()) for ticket in tickets]
    await settled()
    assert queues.depth() == WAITING
    return asked


async def dismissed() -> tuple[Queues, list[asyncio.Task[ReplicaHandle]]]:
    """A crowd whose only replica has gone, in the turn in which its dismissal began."""
    queues = Queues()
    asked = await crowd(queues)
    queues.alpha.engine = EngineKind.EXTERNAL
    queues.alpha.handles[0].answering = False
    queues.admission.dismiss("alpha")
    return queues, asked


async def most_in_a_turn(queues: Queues) -> int:
    """How many requests leave the queue in one turn at most, until it is empty."""
    depths = [queues.depth()]
    while depths[-1]:
        await asyncio.sleep(0)
        depths.append(queues.depth())
    return max(before - after for before, after in itertools.pairwise(depths))


def reasons(results: list[ReplicaHandle | BaseException]) -> set[Refusal]:
    assert all(isinstance(result, Refused) for result in results)
    return {result.reason for result in results if isinstance(result, Refused)}


async def test_requests_for_a_model_without_replicas_are_dismissed_over_several_turns() -> None:
    queues, asked = await dismissed()
    assert queues.depth() == WAITING - MOST_REJECTED
    assert await most_in_a_turn(queues) == MOST_REJECTED
    assert reasons(await asyncio.gather(*asked, return_exceptions=True)) == {Refusal.NO_REPLICA}


async def test_requests_that_are_not_dismissed_yet_wait_for_a_replica_that_comes_back() -> None:
    queues, asked = await dismissed()
    queues.alpha.handles[0].answering = True
    await settled()
    assert queues.depth() == WAITING - MOST_REJECTED
    await leave(*asked[MOST_REJECTED:])


async def test_requests_for_a_model_that_is_removed_are_dismissed_though_it_comes_back_at_once() -> None:
    """They waited for their deadline, beside the idle replicas of the model that came back."""
    queues = Queues()
    admission = queues.admission
    view = FleetView("", queues.metrics, events=FleetListeners(unavailable=admission.dismiss))
    queues.alpha = alpha_of(view)
    asked = await crowd(queues, running=False)
    late = queues.arrive(queues.alpha)
    view.read_document(Deployment(models=(ModelSpec(name="beta"),)))
    assert queues.depth() == WAITING - MOST_REJECTED
    back = alpha_of(view)
    assert back is not queues.alpha
    waits = await queues.ask(queues.arrive(back))
    assert reasons(await asyncio.gather(*asked, return_exceptions=True)) == {Refusal.NO_REPLICA}
    # One that was read before the removal, and one that a replica sends back after it, wait for nothing.
    for ticket in (late, queues.arrive(queues.alpha)):
        assert reasons(await asyncio.gather(ticket.wait(), return_exceptions=True)) == {Refusal.NO_REPLICA}
    assert not waits.done()
    assert [request.model for request in admission.waiting()] == ["alpha"]
    await leave(waits)
    view.close()


def alpha_of(view: FleetView) -> ServedModel:
    """The model "alpha" of the view once it is declared, without a replica."""
    view.read_document(Deployment(models=(ModelSpec(name="alpha"),)))
    served = view.get("alpha")
    assert served is not None
    return served


async def test_requests_for_an_adapter_that_cannot_be_loaded_are_rejected_over_several_turns() -> None:
    queues = Queues()
    adapters = queues.alpha.handles[0].adapters
    adapters.loads = True
    asked = await crowd(queues, "sql")
    adapters.update([], ["sql"])
    for _ in range(2):  # its next report says so again
        queues.admission.give_up("alpha", {"sql"})
    assert await most_in_a_turn(queues) == MOST_REJECTED
    assert reasons(await asyncio.gather(*asked, return_exceptions=True)) == {Refusal.ADAPTER_FAILED}


def test_requests_expire_over_several_turns_and_none_of_them_is_offered_a_slot() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        queues = Queues()
        asked = await crowd(queues)
        loop.pause(61.0)
        while queues.depth() == WAITING:  # noqa: ASYNC110 - until the very turn
            await asyncio.sleep(0)
        queues.alpha.handles[0].view.bound = WAITING
        assert queues.depth() == WAITING - MOST_REJECTED
        assert await most_in_a_turn(queues) == MOST_REJECTED
        assert reasons(await asyncio.gather(*asked, return_exceptions=True)) == {Refusal.DEADLINE}

    run_virtual(main)  # the deadline passes at no other moment
