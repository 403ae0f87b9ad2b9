"""The checks of a deployment: ports, Ray, the network between nodes, and certificates."""

from __future__ import annotations

import http.server
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.config.deployment import Deployment
from policy.config.port_conflicts import ListenAddress
from policy.deployment_file.parse import parse
from serve.internode_bandwidth import BandwidthReport, NodePair
from tests.gateway.certificate import certify
from tests.ports import free_ports
from tidegate.doctor import deployment as checks
from tidegate.doctor.finding import Severity

SIM = {
    "name": "m", "engine": "sim", "shapes": {"small": {"cpus": 1}},
    "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}}},
}  # fmt: skip


def deployment(model: dict[str, Any] | None = None, **sections: Any) -> Deployment:
    return parse({"models": [model or SIM], **sections})


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_that_is_in_use_names_its_process(taken: int) -> None:
    wanted = [ListenAddress("gateway.port", "127.0.0.1", port) for port in (taken, *free_ports(1))]
    found = checks.ports(wanted, [])
    assert found.level is Severity.ERROR
    assert f"gateway.port 127.0.0.1:{taken}: the port is in use by" in found.found
    assert f"(pid {os.getpid()})" in found.found


def test_ports_of_the_running_deployment_are_its_own(taken: int) -> None:
    (free,) = free_ports(1)
    wanted = [ListenAddress("gateway.port", "127.0.0.1", port) for port in (taken, free)]
    found = checks.ports(wanted, wanted[:1])
    assert (found.level, found.found) == (Severity.OK, f"{free} free; {taken} in use by this deployment")


def test_ray_is_not_needed_for_external_models() -> None:
    external = deployment({"name": "m", "engine": "external", "urls": ["http://127.0.0.1:1"]})
    assert checks.ray(external, lambda: "unused", {}).level is Severity.NOT_APPLICABLE


def test_another_cluster_on_this_machine_is_an_error() -> None:
    found = checks.ray(deployment(), lambda: "another Ray cluster runs: raylet; to join it set X", {})
    assert (found.level, found.found) == (Severity.ERROR, "another Ray cluster runs: raylet")
    assert found.advice == "stop it; to join it set X"
    assert checks.ray(deployment(), lambda: None, {}).level is Severity.OK


def test_a_cluster_to_join_must_answer_and_its_token_be_here(taken: int, tmp_path: Path) -> None:
    token = tmp_path / "token"
    known = {"RAY_AUTH_TOKEN_PATH": str(token)}
    joined = deployment(cluster={"address": f"127.0.0.1:{taken}", "controller": "127.0.0.1:7070"})
    missing = checks.ray(joined, lambda: None, known)
    assert (missing.level, f"no token at {token}" in missing.found) == (Severity.ERROR, True)
    token.write_text("x")
    assert checks.ray(joined, lambda: None, known).level is Severity.OK
    (nobody,) = free_ports(1)
    away = deployment(cluster={"address": f"127.0.0.1:{nobody}", "controller": "127.0.0.1:7070"})
    assert "cannot be reached" in checks.ray(away, lambda: None, known).found


def pair(bytes_per_s: float) -> NodePair:
    return NodePair(source="10.0.0.1", target="10.0.0.2", bytes_per_s=bytes_per_s, rtt_s=0.00015)


@pytest.mark.parametrize(
    ("measured", "level", "text"),
    [
        (
            BandwidthReport(pairs=(pair(3e9), pair(1.25e9))),
            Severity.OK,
            "10.0.0.1 to 10.0.0.2 10.00 Gbit/s, 0.15 ms",
        ),
        (BandwidthReport(pairs=(pair(3e9), pair(1e8))), Severity.WARNING, "0.80 Gbit/s"),
        (BandwidthReport(), Severity.NOT_APPLICABLE, "the cluster has one node"),
        (BandwidthReport(error="no token"), Severity.WARNING, "not measured: no token"),
    ],
)
def test_the_network_between_nodes(measured: BandwidthReport, level: Severity, text: str) -> None:
    joined = deployment(cluster={"address": "10.0.0.1:6379", "controller": "10.0.0.1:7070"})
    found = checks.network(joined, lambda _: measured)
    assert found.level is level
    assert text in found.found


def test_there_is_no_network_on_one_machine() -> None:
    for given in (None, deployment()):
        found = checks.network(given, lambda _: pytest.fail("measured"))
        assert (found.level, "no cluster is joined" in found.found) == (Severity.NOT_APPLICABLE, True)


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The URL of a server whose certificate ends tomorrow, and the file that verifies it."""
    file = tmp_path / "ca.pem"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        server.socket = certify(file).wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://127.0.0.1:{server.server_port}/v1", file
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_certificates_are_verified_and_their_end_is_shown(secure: tuple[str, Path]) -> None:
    url, file = secure
    now = time.time()
    server = {"url": url, "ca_file": str(file)}
    (soon,) = checks.certificates(deployment({"name": "m", "engine": "external", "urls": [server]}), now)
    assert (soon.level, soon.found) == (Severity.WARNING, "127.0.0.1: trusted, ends in 1 days")
    assert checks.certificate(url, str(file), now - 30 * 86_400).level is Severity.OK
    assert "not trusted" in checks.certificate(url, None, now).found
    assert checks.certificate(url, str(file.with_name("none")), now).level is Severity.ERROR
    ours = {"tls": {"cert_file": str(file), "key_file": str(file.with_suffix(".key"))}}
    (own,) = checks.certificates(deployment(gateway=ours), now)
    assert (own.level, own.found) == (Severity.WARNING, "gateway.tls: its files fit, ends in 1 days")
    ours["tls"]["key_file"] = str(file)
    assert checks.certificates(deployment(gateway=ours), now)[0].level is Severity.ERROR
    (nobody,) = free_ports(1)
    assert checks.certificate(f"https://127.0.0.1:{nobody}", None, now).level is Severity.WARNING


def test_without_https_there_are_no_certificates() -> None:
    for given in (None, deployment()):
        assert [each.level for each in checks.certificates(given, 0.0)] == [Severity.NOT_APPLICABLE]
