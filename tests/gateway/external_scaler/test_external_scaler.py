"""A client generated from KEDA's published protocol carries out the controller's decisions."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.api.external_metrics import GROUP
from gateway.external_scaler import handlers
from gateway.external_scaler.handlers import ExternalScalerHandlers
from gateway.grpc_server.port import GrpcServer
from gateway.routing.fleet import FleetView
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from policy.config.grpc_ports import ExternalScaler
from policy.types import EngineKind, FleetSnapshot, Model
from store.state_dir import StateDir
from tests.gateway.api.admin.test_authorization import Port
from tests.kubernetes_api import DEPLOYMENTS, STATEFUL_SETS, KubernetesApi
from tests.ports import free_ports
from tests.serve.actuator.test_kubernetes import controlling, eventually
from tests.serve.sim_documents import external_model

COUNTS = {"small": 3, "large": 1}
FLEET = FleetSnapshot(
    epoch=1.0,
    version=1,
    at=0.0,
    models=(
        Model(name="org/m", engine=EngineKind.EXTERNAL, counts=COUNTS),
        Model(name="own", engine=EngineKind.SIM, target=2),
    ),
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """The generated messages and client."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="pip install grpcio-tools")
    source, made = Path(__file__).parent, tmp_path_factory.mktemp("made")
    options = [f"--proto_path={source}", f"--python_out={made}", f"--grpc_python_out={made}"]
    assert protoc.main(["protoc", *options, "externalscaler.proto"]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(made))
        names = ("externalscaler_pb2", "externalscaler_pb2_grpc")
        yield importlib.import_module(names[0]), importlib.import_module(names[1])
        for name in names:
            del sys.modules[name]


class Site:
    """A scaler over ``view``, and KEDA's client of it."""

    def __init__(self, messages: Any, client: Any, view: FleetView) -> None:
        self.messages, self.client, self.view = messages, client, view

    def ref(self, model: str = "org/m", **metadata: str) -> Any:
        given = {"model": model, **metadata} if model else metadata
        return self.messages.ScaledObjectRef(name="vllm", namespace="models", scalerMetadata=given)

    async def count(self, **metadata: str) -> float:
        request = self.messages.GetMetricsRequest(
            scaledObjectRef=self.ref(**metadata), metricName=handlers.METRIC
        )
        (found,) = (await self.client.GetMetrics(request)).metricValues
        assert (found.metricName, found.metricValue) == (handlers.METRIC, int(found.metricValueFloat))
        return float(found.metricValueFloat)


@pytest.fixture
async def site(published: tuple[Any, Any]) -> AsyncIterator[Site]:
    messages, services = published
    (port,) = free_ports(1)
    view = FleetView("", WorkerMetrics())
    server = GrpcServer(
        "external_scaler",
        ExternalScaler(port=port),
        ExternalScalerHandlers(view),
        StructuredLog(0),
        watch=True,
    )
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Site(messages, services.ExternalScalerStub(channel), view)
    await server.drain(60.0)


async def test_the_methods_answer_as_published(site: Site) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await site.client.IsActive(site.ref())
    assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE
    site.view.take(FLEET, "controller", 0.0)
    assert (await site.client.IsActive(site.ref())).result
    for metadata, count in (({}, 4), ({"shape": "small"}, 3), ({"shape": "large", "model": "org.m"}, 1)):
        assert await site.count(**metadata) == count
    (spec,) = (await site.client.GetMetricSpec(site.ref())).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (handlers.METRIC, 1, 1.0)
    streamed = site.client.StreamMetricSpec(site.ref())
    assert list((await anext(aiter(streamed))).metricSpecs) == [spec]
    for metadata, message in (
        ({"model": "own"}, "no model 'own' is scaled by an autoscaler; models that are: org/m"),
        ({"shape": "huge"}, "no shape 'huge'; it has small, large"),
        ({"model": ""}, "models/vllm has no `model`"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
            await site.client.IsActive(site.ref(**metadata))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.slow
async def test_keda_carries_out_decisions_from_zero_and_back(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KEDA activates the workload when it is told to, then an HPA sets its count."""
    monkeypatch.setattr(handlers, "LOOK_EVERY_S", 0.02)
    api = KubernetesApi()
    await api.start()
    api.workload(STATEFUL_SETS, "small")
    api.workload(DEPLOYMENTS, "large")
    model = external_model(api.url, kubernetes={"scaled_by": "autoscaler"})
    model["control"] = {"policy": "static"}
    active: list[bool] = []

    async def keda() -> None:
        async for answer in site.client.StreamIsActive(site.ref("m", shape="small")):
            active.append(answer.result)

    async def poll() -> None:
        while True:
            site.view.take(controller.fleet(), "controller", 0.0)
            count = int(await site.count(model="m", shape="small")) if active and active[-1] else 0
            api.scale(STATEFUL_SETS, "small", count)
            await asyncio.sleep(0.02)

    state = StateDir(tmp_path / "state").ensure()
    async with controlling(state, model) as controller:
        await eventually(lambda: bool(controller.fleet().models))
        site.view.take(controller.fleet(), "controller", 0.0)
        tasks = [asyncio.create_task(work) for work in (keda(), poll())]

        def ready() -> int:
            return controller.status().models[0].ready

        for count in (0, 3, 0):
            controller.scale("m", count)
            await eventually(lambda count=count: ready() == count == len(api.pods("small")))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert active[-3:] == [False, True, False]
    await api.stop()


async def test_an_hpa_reads_external_metrics_without_a_token(tmp_path: Path) -> None:
    port = Port(StateDir(tmp_path))
    view = port.services.fleet = FleetView("", WorkerMetrics())
    (listed,) = (await port.ask(GROUP)).json()["resources"]
    path = f"{GROUP}/namespaces/models/{listed['name']}?labelSelector="
    answer = await port.ask(f"{path}model%3Dorg.m")
    assert (answer.status_code, answer.json()["kind"]) == (404, "Status")
    view.take(FLEET, "controller", 0.0)
    for selector, value in (("model%3Dorg.m", "4"), ("model%3Dorg.m%2Cshape%3Dsmall", "3")):
        (item,) = (await port.ask(path + selector)).json()["items"]
        assert (item["metricName"], item["value"]) == (listed["name"], value)
        assert json.dumps(item["metricLabels"]).count("org.m") == 1
