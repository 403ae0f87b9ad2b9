"""Reports of gateways and replicas reach the aggregator with monotonic times."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from policy.types import ReplicaLoad
from policy.wire.controller_reports import EngineReport, GatewayReport, GpuReport, ModelReport
from policy.wire.heartbeat import Heartbeat
from tests.serve.plane import Plane
from tests.serve.replicas import replica
from tests.serve.sim_documents import document


@pytest.fixture
async def served(plane: Plane) -> AsyncIterator[httpx.AsyncClient]:
    await plane.up(document())
    async with plane.client() as client:
        yield client


async def test_gateway_reports_reach_the_aggregator(plane: Plane, served: httpx.AsyncClient) -> None:
    for number in range(1, 11):
        plane.now += 1.0
        report = GatewayReport(
            worker="w", number=number, since_s=float(number), models={"m": ModelReport(arrived=4 * number)}
        )
        answer = await served.post("/signals", content=msgspec.json.encode(report))
        assert (answer.status_code, answer.json()) == (200, {"wants_detail": False})
    demand = plane.controller.aggregator.signals("m", plane.monotonic() + 2.0).demand
    assert demand is not None
    assert demand.arrivals.last_6_s == pytest.approx(4.0)
    assert demand.age_s == 2.0


async def test_heartbeats_reach_the_aggregator(plane: Plane, served: httpx.AsyncClient) -> None:
    running = replica(load=ReplicaLoad(at=0.0, running=3))
    beat = Heartbeat(replica=running, engine=EngineReport(deferred=2), gpus=GpuReport(watts=250.0))
    assert (await served.post("/replicas", content=msgspec.json.encode(beat))).status_code == 200
    (seen,) = plane.controller.aggregator.signals("m", plane.monotonic() + 1.0).replicas
    assert (seen.running, seen.deferred, seen.watts, seen.age_s) == (3, 2, 250.0, 1.0)
