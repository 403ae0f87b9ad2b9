"""Two deployments on one Ray cluster: each has its own controller and applications, and ends only those."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from click.testing import CliRunner

from policy.errors import Unreachable
from serve.controller.client import ControllerClient
from serve.controller.crash_loop_backoff import last_run
from serve.ray_launcher import token_path
from store.os_process import find
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.ray_head import RayHead
from tests.serve.sim_documents import document, sim_model
from tidegate.cli import group

pytestmark = [pytest.mark.slow, pytest.mark.ray]
WITHIN_S = 240.0


@dataclass
class Tenant:
    """One deployment on the head."""

    state: StateDir
    cluster: dict[str, Any]
    client: ControllerClient

    def write(self, *models: dict[str, Any]) -> None:
        self.state.save(self.state.deployment_path, document(*models, cluster=self.cluster))

    def command(self, verb: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "serve.ray_launcher", verb, "--state", str(self.state.root)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def pid(self) -> int:
        """That of the controller, 0 while none answers."""
        try:
            return self.client.status().pid
        except Unreachable:
            return 0

    def ready(self, *models: str) -> set[str]:
        def found() -> bool:
            try:
                status = self.client.status()
            except Unreachable:
                return False
            return {model.name: model.ready for model in status.models} == dict.fromkeys(models, 1)

        until(found)
        replicas = {replica.id for replica in self.client.fleet().replicas}
        return replicas | {str(self.client.status().pid)}


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def tenants(ray_site: RayHead, tmp_path: Path) -> Iterator[tuple[Tenant, Tenant]]:
    made = []
    for name, port in zip(("a", "b"), free_ports(2), strict=True):
        state = StateDir(tmp_path / name).ensure()
        shutil.copy(token_path(ray_site.state), token_path(state))
        cluster = msgspec.to_builtins(ray_site.deployment.cluster) | {"controller": f"127.0.0.1:{port}"}
        client = ControllerClient(cluster["controller"], state.secret())
        made.append(Tenant(state, cluster, client))
    yield made[0], made[1]
    for tenant in made:
        if tenant.state.deployment_path.exists():
            tenant.command("stop")
        tenant.client.close()


def test_each_deployment_manages_only_its_own(ray_site: RayHead, tenants: tuple[Tenant, Tenant]) -> None:
    one, other = tenants
    for tenant in tenants:
        # The same model of the same configuration in both.
        tenant.write()
        tenant.command("start")
    first, others = one.ready("m"), other.ready("m")
    assert not first & others
    for tenant, replicas in ((one, first), (other, others)):
        words = ["--state-dir", str(tenant.state.root), "logs", "controller", "--since", "1h"]
        shown = CliRunner().invoke(group, words).output
        assert any(f"INFO     controller     {replica}: ready" in shown for replica in replicas), shown
    one.command("stop")
    with pytest.raises(Unreachable):
        one.client.status()
    assert other.ready("m") == others
    assert len(_applications(ray_site)) == 1


def _applications(head: RayHead) -> list[str]:
    token = token_path(head.state).read_text()
    url = f"http://127.0.0.1:{head.deployment.cluster.dashboard_port}/api/serve/applications/"
    answer = httpx.get(url, headers={"authorization": f"Bearer {token}"}, trust_env=False)
    return list(answer.json()["applications"])


def test_a_controller_without_its_supervisor_reads_the_stored_document(
    tenants: tuple[Tenant, Tenant],
) -> None:
    one, _ = tenants
    one.write()
    one.command("start")
    before = one.ready("m")
    one.write(sim_model(), sim_model("other"))
    one.command("start")
    after = one.ready("m", "other")
    # The same controller and the same replica continue.
    assert before < after


@pytest.fixture
def running(tenants: tuple[Tenant, Tenant]) -> Tenant:
    one, _ = tenants
    one.write()
    one.command("start")
    one.ready("m")
    return one


def test_a_stopped_controller_is_restarted_on_command(running: Tenant) -> None:
    (replica,) = running.client.fleet().replicas
    pid = running.client.status().pid
    os.kill(pid, signal.SIGSTOP)
    running.command("restart")
    until(lambda: running.pid() not in (0, pid))
    running.ready("m")
    assert [(r.id, r.pid) for r in running.client.fleet().replicas] == [(replica.id, replica.pid)]


def test_a_stopped_host_is_replaced(running: Tenant) -> None:
    """Its start may take a minute; that it hangs is noticed in much less."""
    (replica,) = running.client.fleet().replicas
    stopped_at = time.monotonic()
    psutil.Process(psutil.Process(replica.pid).ppid()).suspend()
    until(lambda: replica.id not in [r.id for r in running.client.fleet().replicas])
    running.ready("m")
    # Ray starts the next one while it ends the stopped one.
    until(lambda: find(replica.pid) is None)
    assert time.monotonic() - stopped_at < 60.0


def test_a_controller_that_fails_is_restarted_with_backoff(running: Tenant) -> None:
    document = running.state.deployment_path.read_bytes()
    running.state.deployment_path.write_text("{")
    os.kill(running.client.status().pid, signal.SIGKILL)

    def failures() -> int:
        run = last_run(running.state)
        return 0 if run is None or "DecodeError" not in run.error else run.failures

    until(lambda: failures() >= 3)
    began, before = time.monotonic(), failures()
    until(lambda: failures() >= before + 3)
    # Waits of at least 0.4, 0.8 and 1.6 s, where Ray alone restarts it at once.
    assert time.monotonic() - began >= 2.0
    running.state.deployment_path.write_bytes(document)
    running.ready("m")
