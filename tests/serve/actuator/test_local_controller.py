"""The controller as a process on this machine: after a kill and a restart it finds the running replicas."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from policy.config.deployment import Cluster
from policy.errors import Unreachable
from policy.types import Replica, ReplicaPhase
from serve.actuator.local import LocalActuator
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.serve.sim_documents import document

pytestmark = pytest.mark.process
WITHIN_S = 180.0


@dataclass
class Local:
    """Controller processes over one state directory, and a client of whichever runs."""

    state: StateDir
    client: ControllerClient
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self) -> None:
        command = [sys.executable, "-m", "serve.controller.process", "--state", str(self.state.root)]
        with (self.state.logs / "controller.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self.answers)

    def answers(self) -> bool:
        with suppress(Unreachable):
            return bool(self.client.status().pid)
        return False

    def end(self, how: signal.Signals) -> None:
        self.process.send_signal(how)
        self.process.wait(WITHIN_S)

    def ready(self, count: int) -> dict[str, Replica]:
        def found() -> list[Replica]:
            replicas = list(self.client.fleet().replicas)
            ready = [replica for replica in replicas if replica.state is ReplicaPhase.READY]
            return ready if len(ready) == len(replicas) == count else []

        return {replica.id: replica for replica in until(found)}


def until(true: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WITHIN_S
    while not (value := true()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


@contextmanager
def client_of(address: str, secret: str) -> Iterator[ControllerClient]:
    client = ControllerClient(address, secret)
    try:
        yield client
    finally:
        client._http.close()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Local]:
    state = StateDir(tmp_path / "state").ensure()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    state.save(state.deployment_path, document(cluster={"controller": address}))
    with client_of(address, state.secret()) as client:
        made = Local(state, client)
        made.start()
        yield made
        if made.process.poll() is None:
            made.end(signal.SIGTERM)
    # Processes that a failed test left running.
    asyncio.run(_end_hosts(state))


async def _end_hosts(state: StateDir) -> None:
    actuator = LocalActuator(state, Cluster(controller=""))
    await actuator.stop()
    await actuator.close()


def test_a_restarted_controller_finds_its_replicas_and_restarts_none(local: Local) -> None:
    local.client.scale("m", 2)
    before = local.ready(2)
    epoch = local.client.fleet().epoch
    local.end(signal.SIGKILL)
    local.start()
    after = local.ready(2)
    assert {(r.id, r.pid, r.incarnation) for r in after.values()} == {
        (r.id, r.pid, r.incarnation) for r in before.values()
    }
    assert local.client.fleet().epoch > epoch
    assert local.client.status().models[0].target == 2


def test_a_killed_host_is_replaced_and_a_mode_switch_ends_the_other_shape(local: Local) -> None:
    (first,) = local.ready(1).values()
    # The engine ends with its host: it holds a pipe of the host.
    psutil.Process(psutil.Process(first.pid).ppid()).kill()
    until(lambda: not psutil.pid_exists(first.pid))
    until(lambda: first.id not in local.ready(1))
    local.client.mode("m", "single-large")
    until(lambda: {replica.shape for replica in local.ready(1).values()} == {"large"})
    assert local.client.status().models[0].phase in ("steady", "draining the old")
