"""A cluster of two Ray nodes with two addresses, joined rather than started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.stack import Stack, eventually
from tests.e2e.traffic import Traffic
from tests.ports import free_ports
from tests.ray_nodes import GPUS_EACH, HEAD, NODE, two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with two_nodes() as address:
        yield address


@pytest.mark.parametrize("supervised", [True, False], ids=["orderly", "supervisor killed"])
def test_replicas_fill_one_node_then_another_and_end(cluster: str, tmp_path: Path, supervised: bool) -> None:
    (port,) = free_ports(1)
    document = {
        "models": [
            {
                "name": "sim",
                "engine": "sim",
                "sim": {"profile": "sim-small"},
                "shapes": {"small": {"gpus": 1}, "large": {"gpus": GPUS_EACH, "tensor_parallel": GPUS_EACH}},
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
