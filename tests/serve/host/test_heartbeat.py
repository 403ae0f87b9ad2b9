"""Heartbeats: usage and steps reach the controller once, even if it was away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec

from policy.engine.step_samples import StepSample
from policy.types import ReplicaPhase
from policy.wire.controller_reports import EngineReport, GpuReport
from policy.wire.heartbeat import AdapterRef, AdapterUse, Heartbeat, HeartbeatResponse
from serve.engine.adapters.usage_accumulator import MAX_VERSIONS, AdapterUsageAccumulator
from serve.host.heartbeat import send_heartbeats
from tests.serve.replicas import replica

SQL = "a" * 64


def use(name: str = "sql", **done: Any) -> AdapterUse:
    return AdapterUse(name=name, digest=SQL, **done)


def test_usage_adds_up_until_it_is_reported_and_a_successful_load_ends_a_failure() -> None:
    usage = AdapterUsageAccumulator()
    for each in (use(requests=1, found=1, busy_s=0.5), use("law", requests=2), use(failed="why")):
        usage.add(each)
    usage.add(use(requests=3, waiting=4))
    expected = use(requests=4, found=1, failed="why", busy_s=0.5, waiting=4)
    assert usage.pending() == (use("law", requests=2), expected)
    usage.add(use(loads=1, load_s=0.3))
    assert usage.pending()[1] == use(requests=4, found=1, loads=1, load_s=0.3, busy_s=0.5)
    for number in range(MAX_VERSIONS):
        usage.add(use(f"a{number}", requests=1))
    assert (len(usage.pending()), usage.pending()[0].name) == (MAX_VERSIONS, "a0")


class Host:
    """The part of a replica host that a heartbeat uses."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(controller="c:1", secret="s")
        self.changed = asyncio.Event()
        self.state = ReplicaPhase.READY
        self.uses: list[AdapterUse] = []
        self.engine: EngineReport | None = None
        self.gpus: GpuReport | None = None
        self.obeyed: list[HeartbeatResponse] = []

    def take_heartbeat(self) -> Heartbeat:
        stub = replica(state=self.state)
        beat = Heartbeat(replica=stub, uses=tuple(self.uses), engine=self.engine, gpus=self.gpus)
        self.uses, self.engine = [], None
        return beat

    def obey(self, orders: HeartbeatResponse) -> None:
        self.obeyed.append(orders)


class ControllerStub(httpx.AsyncBaseTransport):
    """Gives ``answers`` in order, then empty orders; keeps what it received."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.received: list[Heartbeat] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.received.append(msgspec.json.decode(request.content, type=Heartbeat))
        answer = self.answers.pop(0) if self.answers else httpx.Response(200, json={})
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_usage_is_sent_again_until_it_is_received_and_orders_are_obeyed() -> None:
    orders = HeartbeatResponse(hold=(AdapterRef(name="sql", digest=SQL),))
    controller = ControllerStub(
        httpx.ConnectError("away"),
        httpx.Response(409, json={"error": {}}),
        httpx.Response(200, content=b"something else on its port"),
        httpx.Response(200, content=msgspec.json.encode(orders)),
    )
    host = Host()
    host.uses = [use(requests=3)]
    beating = asyncio.create_task(send_heartbeats([host], controller))  # type: ignore[list-item]
    while not host.obeyed:
        host.changed.set()
        await asyncio.sleep(0)
    beating.cancel()
    assert host.obeyed == [orders]
    assert [sum(use.requests for use in each.uses) for each in controller.received[:4]] == [3, 3, 3, 0]


async def test_the_last_heartbeat_of_a_stopped_replica_has_all_that_was_not_received() -> None:
    controller = ControllerStub(httpx.ConnectError("away"))
    host = Host()
    host.uses = [use(requests=1)]
    beating = asyncio.create_task(send_heartbeats([host], controller))  # type: ignore[list-item]
    while not controller.received:  # noqa: ASYNC110 - the stub has no event
        await asyncio.sleep(0)
    host.uses, host.state = [use(requests=2)], ReplicaPhase.STOPPED
    host.changed.set()
    await beating
    assert [sum(use.requests for use in each.uses) for each in controller.received] == [1, 3]


async def test_of_several_controllers_the_one_that_leads_is_found_and_asked_first() -> None:
    asked: list[str] = []

    class Controllers(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            asked.append(request.url.host)
            return httpx.Response(200 if request.url.host == "two" else 503, json={})

    host = Host()
    host.spec.controller = "one:1,two:1"
    beating = asyncio.create_task(send_heartbeats([host], Controllers()))  # type: ignore[list-item]
    while len(host.obeyed) < 2:
        host.changed.set()
        await asyncio.sleep(0)
    beating.cancel()
    assert asked[:3] == ["one", "two", "two"]


async def test_steps_are_sent_until_they_are_received_and_power_as_it_is() -> None:
    controller = ControllerStub(httpx.ConnectError("away"), httpx.Response(409, json={"error": {}}))
    host = Host()
    host.gpus = GpuReport(watts=300.0)
    step = StepSample(2, 4.0, 600.0, 4.0, 0.1)
    host.engine = EngineReport(preempted=1, steps=(step,))
    beating = asyncio.create_task(send_heartbeats([host], controller))  # type: ignore[list-item]
    while len(controller.received) < 4:
        if len(controller.received) == 1 and host.engine is None:
            host.engine = EngineReport(preempted=2, steps=(step,))
        host.changed.set()
        await asyncio.sleep(0)
    beating.cancel()
    assert [each.gpus for each in controller.received[:4]] == [host.gpus] * 4
    counts = [each.engine.steps[0].count if each.engine else None for each in controller.received[:4]]
    assert counts == [2, 4, 4, None]
    assert controller.received[2].engine is not None
    assert controller.received[2].engine.preempted == 2
