"""Servers of external models by DNS, in a file, and in Kubernetes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.routing.discovered_server import resolved
from gateway.routing.server_discovery import ServerDiscovery
from gateway.telemetry.structured_log import StructuredLog
from policy.config.deployment import ModelSpec
from policy.deployment_file.parse import parse
from policy.scaling.reconcile_steps import LayerKey
from store.kubernetes import api_server
from tests.gateway.fake_replica import Exchange, answer_json
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.worker import Stack, until
from tests.kubernetes_api import KubernetesApi

PODS = 20
SHAPED: dict[str, Any] = {
    "shapes": {"big": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}},
    "modes": {"one": {"shape": "big"}, "many": {"shape": "small"}},
}


def external(*urls: str, more: dict[str, Any] | None = None, **discovery: Any) -> ModelSpec:
    model = {"name": "alpha", "engine": "external", "urls": list(urls), "discovery": discovery}
    return parse({"models": [model | (more or {})]}).models[0]


async def built(discovery: ServerDiscovery, spec: ModelSpec) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """Port, shape, mode and adapters of each server."""
    found = [resolved(each, spec, None) for each in await discovery.servers(spec)]
    return [(each.url.rpartition(":")[2], each.shape, each.mode, each.adapters) for each in found]


def service_of(api: KubernetesApi) -> dict[str, Any]:
    return {"service": "vllm", "namespace": "models", "port": "http", "api": api.url}


@pytest.fixture
async def api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KubernetesApi]:
    monkeypatch.setattr(api_server, "RETRY_S", 0.01)
    made = KubernetesApi()
    await made.start()
    yield made
    await made.stop()


async def urls_of(discovery: ServerDiscovery, spec: ModelSpec) -> list[str]:
    return [server.url for server in await discovery.servers(spec)]


async def test_each_address_of_a_name_is_a_server_beside_those_listed() -> None:
    discovery = ServerDiscovery(StructuredLog(0))
    spec = external("http://10.0.0.1:8000", dns="127.0.0.1:9000", https=True, model="theirs", max_in_flight=7)
    listed, found = await discovery.servers(spec)
    assert (listed.url, found.url) == ("http://10.0.0.1:8000", "https://127.0.0.1:9000")
    assert (found.model, found.max_in_flight) == ("theirs", 7)
    assert await urls_of(discovery, external(dns="[::1]:9000")) == ["http://[::1]:9000"]


async def test_a_name_that_is_not_found_leaves_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    discovery, spec = ServerDiscovery(StructuredLog(0)), external(dns="127.0.0.1:9000")
    before = await urls_of(discovery, spec)

    async def fails(*_: Any, **__: Any) -> Any:
        raise OSError("no name server")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", fails)
    assert await urls_of(discovery, spec) == before != []


async def test_a_file_is_read_again_when_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "servers.yaml"
    discovery, spec = ServerDiscovery(StructuredLog(0)), external(file=str(path), model="theirs")
    assert await urls_of(discovery, spec) == []

    def write(text: str, at: int) -> None:
        path.write_text(text)
        os.utime(path, (at, at))

    write("- http://h:1\n- {url: 'http://h:2', model: own}\n", 1)
    assert [(each.url, each.model) for each in await discovery.servers(spec)] == [
        ("http://h:1", "theirs"),
        ("http://h:2", "own"),
    ]
    # The last three fail in YAML's own conversions, with errors of other kinds.
    wrong = (
        "- ftp://h:1\n",
        "- [",
        "3",
        "- http://h:1\n- http://h:1\n",
        "- !!bool x",
        "- !!timestamp x",
        "[" * 2000,
    )
    for at, text in enumerate(wrong, start=2):
        write(text, at)
        assert await urls_of(discovery, spec) == ["http://h:1", "http://h:2"]
    write("- http://h:3\n", 12)
    assert await urls_of(discovery, spec) == ["http://h:3"]
    # Once when the file was missing, once when it became invalid.
    logged = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert logged == ["discovery_failed"] * 2
    await discovery.keep(())
    path.unlink()
    assert await urls_of(discovery, spec) == []


async def test_ready_endpoints_of_a_service_are_followed(api: KubernetesApi) -> None:
    discovery = ServerDiscovery(StructuredLog(0))
    spec = external(kubernetes=service_of(api))

    async def becomes(*endpoints: str) -> None:
        wanted = [f"http://{each}" for each in endpoints]

        async def is_so() -> bool:
            return await urls_of(discovery, spec) == wanted

        await until(is_so, f"servers {wanted}")

    api.put("10.0.0.1:80")
    api.put("10.0.0.2:80", ready=None)
    await becomes("10.0.0.1:80", "10.0.0.2:80")
    assert api.paths[0].startswith("/apis/discovery.k8s.io/v1/namespaces/models/endpointslices?")
    assert "labelSelector=kubernetes.io%2Fservice-name%3Dvllm" in api.paths[0]
    api.put("10.0.0.3:80")
    api.put("10.0.0.1:80", ready=False)
    await becomes("10.0.0.2:80", "10.0.0.3:80")
    api.delete("10.0.0.2:80")
    await becomes("10.0.0.3:80")
    api.put("10.0.0.4:80", port_name="other")
    for lose in (api.cut, lambda: setattr(api, "forgotten", 2)):
        api.forgotten = 0
        lose()
        api.put("10.0.0.5:80")
        await becomes("10.0.0.3:80", "10.0.0.5:80")
        api.cut()
        api.delete("10.0.0.5:80")
        await becomes("10.0.0.3:80")
    await api.stop()
    await asyncio.sleep(0.05)
    await becomes("10.0.0.3:80")
    await discovery.close()


async def test_a_file_says_how_its_servers_were_built(tmp_path: Path) -> None:
    path = tmp_path / "servers.yaml"
    path.write_text(
        "- http://h:1\n"
        "- {url: 'http://h:2', mode: one, adapters: [sql]}\n"
        "- {url: 'http://h:3', shape: huge}\n"
    )
    discovery, spec = ServerDiscovery(StructuredLog(0)), external(file=str(path), shape="small", more=SHAPED)
    assert await built(discovery, spec) == [
        ("1", "small", "many", ()), ("2", "big", "one", ("sql",)), ("3", "", "", ()),
    ]  # fmt: skip
    last = resolved((await discovery.servers(spec))[-1], spec, None)
    assert last.problem == f"{path}: http://h:3: shape: got 'huge', expected one of the shapes: big, small"


async def test_labels_of_pods_say_how_they_were_built(api: KubernetesApi) -> None:
    discovery = ServerDiscovery(StructuredLog(0))
    spec = external(kubernetes=service_of(api), more=SHAPED)

    async def becomes(*wanted: tuple[str, str, str, tuple[str, ...]]) -> None:
        async def is_so() -> bool:
            return await built(discovery, spec) == list(wanted)

        await until(is_so, f"servers {wanted}")

    api.put_service({"app": "vllm"})
    for i, labels in enumerate(({}, {"tidegate.io/shape": "big"}, {"tidegate.io/mode": "one"}), start=1):
        api.put_pod(f"vllm-{i}", labels, {"tidegate.io/adapters": "sql, chat,"} if i == 2 else {})
        # What is said of the service is said of all of its pods.
        api.put(f"10.0.0.1:{i}", pod=f"vllm-{i}", labels={"tidegate.io/shape": "small"})
    first, third = ("1", "small", "many", ()), ("3", "big", "one", ())
    await becomes(first, ("2", "big", "one", ("sql", "chat")), third)
    api.put_pod("vllm-2", {"tidegate.io/shape": "huge"})
    await becomes(first, ("2", "", "", ()), third)
    found = resolved((await discovery.servers(spec))[1], spec, None)
    expected = "one of the shapes: big, small"
    assert found.problem == f"pod vllm-2: tidegate.io/shape: got 'huge', expected {expected}"
    # The controller knows of what workload a pod is.
    layer = LayerKey("alpha", "small", 3)
    certain = resolved(found, spec, layer)
    assert (certain.replica, certain.shape, certain.mode, certain.generation) == (
        "vllm-2-uid of v", "small", "many", 3,
    )  # fmt: skip
    # Other pods behind the same service.
    api.put_service({"app": "other"})
    await becomes(first, ("2", "small", "many", ()), ("3", "small", "many", ()))
    await discovery.close()


@pytest.mark.parametrize(
    ("pod", "service", "ports", "problem"),
    [
        ({}, {}, (7000, None), ""),
        ({}, {"tidegate.io/kv-events-port": "5557"}, (5557, None), ""),
        ({"tidegate.io/kv-events-port": "1", "tidegate.io/kv-events-replay-port": "2"}, {}, (1, 2), ""),
        ({"tidegate.io/kv-events-port": "x"}, {}, (None, None), "kv-events-port: got 'x', expected a port"),
        ({"tidegate.io/kv-events-port": "65536"}, {}, (None, None), "kv-events-port: got '65536'"),
        (
            {"tidegate.io/kv-events-port": "1", "tidegate.io/kv-events-replay-port": "1"},
            {},
            (None, None),
            "kv-events-replay-port: got '1', expected a port, 1 to 65535, another for each of the two",
        ),
    ],
)
async def test_pods_and_services_say_where_their_events_are(
    api: KubernetesApi, pod: dict[str, str], service: dict[str, str], ports: tuple[Any, Any], problem: str
) -> None:
    spec = external(kubernetes=service_of(api), kv_events_port=7000, more=SHAPED)
    discovery = ServerDiscovery(StructuredLog(0))
    api.put_service({"app": "vllm"})
    api.put_pod("vllm-1", {}, pod)
    api.put("10.0.0.1:1", pod="vllm-1", labels=service)

    async def is_so() -> bool:
        found = await discovery.servers(spec)
        return [(each.kv_events_port, each.kv_events_replay_port) for each in found] == [ports]

    await until(is_so, f"the ports {ports}")
    [found] = await discovery.servers(spec)
    assert problem in resolved(found, spec, None).problem
    await discovery.close()


async def test_a_pod_of_two_address_families_is_one_server(
    api: KubernetesApi, capsys: pytest.CaptureFixture[str]
) -> None:
    discovery = ServerDiscovery(StructuredLog(0))
    api.put("fd00::1:8000", pod="vllm-x1", addressType="IPv6")
    api.put("10.0.0.1:8000", pod="vllm-x1", addressType="IPv4")
    api.put("fd00::2:8000", pod="vllm-x2", addressType="IPv6")
    assert await urls_of(discovery, external(kubernetes=service_of(api))) == [
        "http://10.0.0.1:8000", "http://[fd00::2]:8000",
    ]  # fmt: skip
    # Labels and pods are not looked at where nothing is declared.
    assert {path.partition("?")[0].rpartition("/")[2] for path in api.paths} == {"endpointslices"}
    for _ in range(2):
        assert await urls_of(discovery, external(kubernetes=service_of(api) | {"port": "grpc"})) == []
    logged = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(each["event"], each["ports"]) for each in logged] == [
        ("kubernetes_port_unknown", "http, metrics")
    ]
    await discovery.close()
    await api.stop()


@pytest.mark.process
@pytest.mark.long
async def test_pods_that_come_and_go_under_load_fail_no_request(stack: Stack) -> None:
    """A pod that ends is first not ready, then serves what it has, then closes."""
    api = KubernetesApi()
    await api.start()
    stack.models = [{"name": "alpha", "engine": "external", "discovery": {"kubernetes": service_of(api)}}]
    pods: list[FakeUpstream] = []

    async def answer(exchange: Exchange) -> None:
        if exchange.path == "/v1/models":
            await exchange.reply(b'{"data": [{"id": "alpha"}]}')
        elif exchange.path == "/metrics":
            await exchange.reply(b"")
        else:
            await asyncio.sleep(0.05)
            await answer_json(exchange)

    async def come() -> None:
        pod = FakeUpstream()
        pod.answer = answer
        await pod.start()
        pods.append(pod)
        api.put(f"127.0.0.1:{pod.port}")

    async def go(pod: FakeUpstream) -> None:
        api.put(f"127.0.0.1:{pod.port}", ready=False)
        await asyncio.sleep(2.0)  # the grace period
        api.delete(f"127.0.0.1:{pod.port}")
        await pod.stop()

    for _ in range(3):
        await come()
    statuses: list[int] = []
    done = asyncio.Event()

    async def ask() -> None:
        while not done.is_set():
            body = {"model": "alpha", "messages": [{"role": "user", "content": f"hello {len(statuses)}"}]}
            statuses.append((await stack.http.post("/v1/chat/completions", json=body)).status_code)

    async def serves() -> bool:
        try:
            return (await stack.http.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    await stack.start_worker()
    await until(serves, "the worker serves")
    asking = [asyncio.create_task(ask()) for _ in range(8)]
    going: list[asyncio.Task[None]] = []
    while len(pods) < PODS:
        await come()
        going.append(asyncio.create_task(go(pods[len(going)])))
        await asyncio.sleep(0.5)
    await asyncio.gather(*going)
    last = pods[-1]
    await until(lambda: sum(hit.path.endswith("completions") for hit in last.hits) > 5, "the last pod serves")
    done.set()
    await asyncio.gather(*asking)
    assert set(statuses) == {200}
    for pod in pods[len(going) :]:
        await pod.stop()
    await api.stop()
