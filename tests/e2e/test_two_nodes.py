"""A cluster of two Ray nodes with two addresses, joined rather than started."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.stack import Stack, eventually
from tests.e2e.traffic import Traffic
from tests.ports import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

HEAD, NODE = "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        yield from _cluster(patch)


def _cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # Ray puts unix sockets below its directory, and their paths are short.
    folder = Path(tempfile.mkdtemp(prefix="tgr-"))
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    gcs, dashboard, client = free_ports(3)
    address = f"{HEAD}:{gcs}"
    common = [
        "--block",
        "--num-cpus",
        "1",
        "--num-gpus",
        "4",
        "--object-store-memory",
        "100000000",
        "--disable-usage-stats",
    ]
    head = ["--head", "--node-ip-address", HEAD, "--port", str(gcs), "--dashboard-port", str(dashboard)]
    head += ["--temp-dir", str(folder / "ray"), "--ray-client-server-port", str(client)]
    node = ["--address", address, "--node-ip-address", NODE]
    ray = str(Path(sys.executable).with_name("ray"))
    env = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    started: list[subprocess.Popen[bytes]] = []
    with (folder / "log").open("wb") as log:
        try:
            for words in (head, node):
                started.append(
                    subprocess.Popen([ray, "start", *words, *common], stdout=log, stderr=log, env=env)
                )
                _wait_for_raylet(started[-1])
            yield address
        finally:
            for process in reversed(started):
                family = [process.pid, *(p.pid for p in psutil.Process(process.pid).children(recursive=True))]
                process.terminate()
                process.wait(60)
                _end(family)
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("supervised", [True, False], ids=["orderly", "supervisor killed"])
def test_replicas_fill_one_node_then_another_and_end(cluster: str, tmp_path: Path, supervised: bool) -> None:
    (port,) = free_ports(1)
    document = {
        "models": [
            {
                "name": "sim",
                "engine": "sim",
                "sim": {"profile": "sim-small"},
                "shapes": {"small": {"gpus": 1}, "large": {"gpus": 4, "tensor_parallel": 4}},
                "modes": {
                    "multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 8}},
                    "single-large": {"shape": "large"},
                },
                "control": {"policy": "static"},
            }
        ]
    }
    stack = Stack(tmp_path, document)
    joined = {"address": cluster, "controller": f"{HEAD}:{port}", "simulated_gpus": 8}
    stack.document["cluster"] |= joined
    stack.write()
    try:
        stack.up()
        stack.steady("sim", 2)
        small = stack.replicas("sim")
        assert len({replica.node for replica in small}) == 1
        # They left the other node whole.
        assert stack.run("mode", "sim", "single-large").returncode == 0
        stack.steady("sim", 1)
        (large,) = stack.replicas("sim")
        assert large.node != small[0].node
        assert stack.run("mode", "sim", "multi-replica").returncode == 0
        assert stack.run("scale", "sim", "5").returncode == 0
        stack.steady("sim", 5)
        replicas = stack.replicas("sim")
        assert len({replica.node for replica in replicas}) == 2
        assert {httpx.URL(replica.url).host for replica in replicas} == {HEAD, NODE}
        with Traffic(stack, "sim", clients=2, max_tokens=8) as traffic:
            eventually(lambda: traffic.replicas == {replica.id for replica in replicas}, 240)
        assert not traffic.problems
        if not supervised:
            psutil.Process(stack.status()["supervisor"]["pid"]).kill()
            eventually(lambda: stack.run("status").returncode == 4, 120)
            assert {replica.pid for replica in stack.replicas("sim")} == {r.pid for r in replicas}
    finally:
        stack.down()
    eventually(lambda: not any(psutil.pid_exists(replica.pid) for replica in replicas), 60)
    # The cluster is not ours: it goes on.
    assert any("raylet" in name for name in (p.name() for p in psutil.process_iter()))


def _wait_for_raylet(process: subprocess.Popen[bytes]) -> None:
    def up() -> bool:
        return any("raylet" in p.name() for p in psutil.Process(process.pid).children(recursive=True))

    eventually(up, 240)


def _end(pids: list[int]) -> None:
    for pid in pids:
        try:
            psutil.Process(pid).kill()
        except psutil.NoSuchProcess:
            continue
