"""Deploys counted: on Ray each generation is deployed once, and none of its replicas is replaced."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
import pytest

from policy.errors import Unreachable
from serve.controller.client import ControllerClient
from serve.ray_launcher import token_path
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.ray_head import RayHead
from tests.serve.sim_documents import document, sim_model

GENERATION_S = 120.0
DEPLOY = re.compile(r"m: deploy small of generation (\d+) ")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(6000, func_only=True)
@pytest.mark.parametrize(
    ("generations", "recoveries"), [(3, 1), pytest.param(50, 10, marks=pytest.mark.long)]
)
def test_each_generation_is_deployed_once(
    ray_site: RayHead, tmp_path: Path, generations: int, recoveries: int
) -> None:
    """The controller is woken every few milliseconds, and at first killed once Serve lists the layer."""
    state = StateDir(tmp_path).ensure()
    shutil.copy(token_path(ray_site.state), token_path(state))
    address = f"127.0.0.1:{free_ports(1)[0]}"
    cluster = msgspec.to_builtins(ray_site.deployment.cluster) | {"controller": address}
    client = ControllerClient(address, state.secret())
    replicas: defaultdict[int, set[str]] = defaultdict(set)

    def written(generation: int) -> dict[str, object]:
        return document(sim_model(sim={"profile": "sim-small", "seed": generation}), cluster=cluster)

    def command(verb: str) -> None:
        words = [sys.executable, "-m", "serve.ray_launcher", verb, "--state", str(state.root)]
        subprocess.run(words, check=True, capture_output=True)

    def deploys() -> Counter[int]:
        logs = state.logs.glob("controller.log*")
        return Counter(int(found) for log in logs for found in DEPLOY.findall(log.read_text()))

    def listed(generation: int) -> bool:
        url = f"http://127.0.0.1:{cluster['dashboard_port']}/api/serve/applications/"
        headers = {"authorization": f"Bearer {token_path(state).read_text()}"}
        names = httpx.get(url, headers=headers, trust_env=False, timeout=30).json()["applications"]
        return any(f"+g{generation}-" in name for name in names)

    def steady(generation: int) -> bool:
        with suppress(Unreachable):
            status = client.scale("m", 1)
            for replica in client.fleet().replicas:
                replicas[replica.generation].add(replica.id)
            return (status.generation, status.phase) == (generation, "steady")
        return False

    state.save(state.deployment_path, written(1))
    command("start")
    try:
        for generation in range(1, generations + 1):
            deadline = time.monotonic() + GENERATION_S
            if generation > 1:
                client.apply(written(generation))
            pid = client.status().pid
            while generation <= recoveries and not listed(generation):
                assert time.monotonic() < deadline
            if generation <= recoveries:
                os.kill(pid, signal.SIGKILL)
            while not steady(generation):
                assert time.monotonic() < deadline, client.status()
    finally:
        command("stop")
        client.close()
    assert deploys() == dict.fromkeys(range(1, generations + 1), 1)
    assert {generation: len(ids) for generation, ids in replicas.items()} == deploys()
