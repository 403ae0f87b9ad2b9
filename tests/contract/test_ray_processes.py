"""kill -9 of each of Ray's processes: the replicas end only with their raylet or their GCS."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from policy.errors import Unreachable
from serve.controller.client import ControllerClient
from serve.ray_launcher import token_path
from tests.ports import free_ports
from tests.ray_head import RayHead, ray_head
from tests.serve.sim_documents import document

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(900, func_only=True)]

WITHIN_S = 240.0
# Parts of the command lines of the processes that are started again.
DASHBOARD, REST, ENVIRONMENTS = "dashboard/dashboard.py", "ray-dashboard-ServeHead", "ray::RuntimeEnvAgent"
HELPERS = (DASHBOARD, REST, ENVIRONMENTS, "ray::ServeController")
GCS, RAYLET = "gcs/gcs_server", "raylet/raylet"


def named(processes: list[psutil.Process], part: str) -> psutil.Process | None:
    for process in processes:
        try:
            if part in " ".join(process.cmdline()[:3]):
                return process
        except psutil.Error:
            continue
    return None


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def site_on(head: RayHead) -> Iterator[Site]:
    site = Site(head)
    try:
        yield site
    finally:
        site.client.close()


class Site:
    """A deployment of one model with two replicas on ``head``."""

    def __init__(self, head: RayHead) -> None:
        self.head = head
        self.cluster = msgspec.to_builtins(head.deployment.cluster)
        self.client = ControllerClient(self.cluster["controller"], head.state.secret())
        head.state.save(head.state.deployment_path, document(cluster=self.cluster))
        command = [sys.executable, "-m", "serve.ray_launcher", "start", "--state", str(head.state.root)]
        subprocess.run(command, check=True, capture_output=True)
        until(lambda: len(self.ready()) == 1)
        self.client.scale("m", 2)
        until(lambda: len(self.ready()) == 2)

    def ready(self) -> dict[str, int]:
        """The engines' process ids of the ready replicas, by replica."""
        try:
            replicas = self.client.fleet().replicas
        except Unreachable:
            return {}
        return {replica.id: replica.pid for replica in replicas if replica.state == "ready"}

    def kill(self, part: str) -> int:
        victim = named(self.head.processes(), part)
        assert victim is not None, part
        victim.kill()
        return victim.pid

    def kill_and_await_successor(self, part: str) -> None:
        killed = self.kill(part)

        def back() -> bool:
            found = named(self.head.processes(), part)
            return found is not None and found.pid != killed and self.serve_answers()

        until(back)

    def serve_answers(self) -> bool:
        url = f"http://127.0.0.1:{self.cluster['dashboard_port']}/api/serve/applications/"
        token = token_path(self.head.state).read_text()
        try:
            answer = httpx.get(url, headers={"authorization": f"Bearer {token}"}, trust_env=False, timeout=20)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200


@contextmanager
def redis(root: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(root), "--save", ""]
    with (root / "redis.log").open("wb") as log, subprocess.Popen(command, stdout=log) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def test_helpers_are_restarted_and_end_no_replica(tmp_path: Path) -> None:
    with ray_head(tmp_path) as head, site_on(head) as site:
        before = site.ready()
        for part in HELPERS:
            site.kill_and_await_successor(part)
            assert site.ready() == before, part
            assert head.process.poll() is None
        # Serve takes orders again.
        site.client.scale("m", 1)
        until(lambda: len(site.ready()) == 1)
        assert site.ready().items() <= before.items()


@pytest.mark.parametrize("part", [GCS, RAYLET])
def test_the_head_ends_with_its_raylet_or_gcs_and_leaves_nothing(tmp_path: Path, part: str) -> None:
    with ray_head(tmp_path) as head, site_on(head) as site:
        started = head.processes()
        site.kill(part)
        assert head.process.wait(WITHIN_S) == 1
        _, left = psutil.wait_procs(started, WITHIN_S)
        assert not left


def test_with_redis_a_killed_gcs_ends_no_replica(tmp_path: Path) -> None:
    with redis(tmp_path) as address, ray_head(tmp_path, redis_address=address) as head, site_on(head) as site:
        before = site.ready()
        site.kill_and_await_successor(GCS)
        assert site.ready() == before
        site.client.scale("m", 3)
        until(lambda: len(site.ready()) == 3)
        assert before.items() <= site.ready().items()
