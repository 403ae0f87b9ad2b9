"""A subscriber gets the later step reports of the engines of its model, and of no other model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from policy.engine.step_samples import StepSample
from policy.errors import TargetError
from policy.types import ReplicaPhase
from policy.wire.controller_reports import EngineReport
from policy.wire.heartbeat import Heartbeat
from serve.autoscaler import step_report_subscribers
from serve.autoscaler.step_report_subscribers import StepLine, StepSubscribers
from serve.controller.controller import Controller
from tests.serve.plane import Plane
from tests.serve.replicas import replica
from tests.serve.sim_documents import document

REPORT = EngineReport(steps=(StepSample(3, 8.0, 100.0, 8.0, 0.01),), hardware="a machine")


def beat(name: str = "r1", engine: EngineReport | None = REPORT, **over: object) -> Heartbeat:
    return Heartbeat(replica=replica(name, **over), engine=engine)


@asynccontextmanager
async def subscribed(listeners: StepSubscribers) -> AsyncIterator[AsyncIterator[StepLine]]:
    async with aclosing(listeners.listen("m", silent_s=1e-3)) as lines:
        assert await anext(lines) == StepLine()
        yield lines


async def test_ready_replicas_of_the_model_are_streamed() -> None:
    listeners = StepSubscribers()
    listeners.publish(beat())  # no subscriber yet
    async with subscribed(listeners) as lines:
        listeners.publish(beat(model="other"))
        listeners.publish(beat(engine=None))
        listeners.publish(beat(state=ReplicaPhase.STARTING))
        listeners.publish(beat())
        assert await anext(lines) == StepLine(replica="r1", shape="small", generation=1, engine=REPORT)


async def test_empty_lines_without_reports() -> None:
    async with subscribed(StepSubscribers()) as lines:
        assert await anext(lines) == StepLine()


async def test_slow_subscriber_loses_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_report_subscribers, "MOST", 2)
    listeners = StepSubscribers()
    async with subscribed(listeners) as lines:
        for name in ("a", "b", "c"):
            listeners.publish(beat(name))
        assert [(await anext(lines)).replica, (await anext(lines)).replica] == ["b", "c"]


async def test_unsubscribed_after_the_stream() -> None:
    listeners = StepSubscribers()
    async with subscribed(listeners):
        pass
    listeners.publish(beat())


async def test_unknown_model_is_refused(plane: Plane) -> None:
    await plane.up(document())
    with pytest.raises(TargetError):
        plane.controller.steps("nobody")
    async with plane.client() as client:
        assert (await client.get("/steps", params={"model": "nobody"})).status_code == 409
        assert (await client.get("/steps")).status_code == 400


async def test_stream_is_ndjson(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    async def finite(controller: Controller, model: str) -> AsyncIterator[StepLine]:
        yield StepLine()
        yield StepLine(replica=model, engine=REPORT)

    await plane.up(document())
    monkeypatch.setattr(Controller, "steps", finite)
    async with plane.client() as client:
        answer = await client.get("/steps", params={"model": "m"})
    lines = [msgspec.json.decode(line, type=StepLine) for line in answer.content.splitlines()]
    assert lines == [StepLine(), StepLine(replica="m", engine=REPORT)]
