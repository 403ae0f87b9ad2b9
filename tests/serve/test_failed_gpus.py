"""A GPU that fails under a real host: the replica ends its streams, leaves, and is replaced."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from policy.errors import Unreachable
from policy.types import Replica, ReplicaPhase
from policy.wire.headers import SECRET_HEADER
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.serve.sim_documents import document, sim_model

pytestmark = pytest.mark.process
WITHIN_S = 180.0

# NVML with three GPUs, whose errors are read from a file named after the process of the host.
NVML = """
import os
import pathlib
from types import SimpleNamespace

NVML_TEMPERATURE_GPU, nvmlEventTypeXidCriticalError = 0, 8


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


def nvmlDeviceGetCount():
    return 3


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetPowerUsage(gpu):
    return 300_000


nvmlDeviceGetTotalEnergyConsumption = nvmlDeviceGetCurrentClocksEventReasons = lambda gpu: 0


def nvmlDeviceGetTemperature(gpu, sensor):
    return 60


def nvmlEventSetCreate():
    return "set"


def nvmlDeviceRegisterEvents(gpu, kinds, events):
    pass


def nvmlEventSetWait(events, timeout_ms):
    errors = pathlib.Path(os.environ["FAKE_NVML"], str(os.getpid()))
    try:
        xid = int(errors.read_text())
        errors.unlink()
    except (OSError, ValueError):
        raise NVMLError from None
    return SimpleNamespace(eventData=xid)


def __getattr__(name):
    # All else that NVML has is not supported by this GPU.
    if not name.startswith("nvmlDevice"):
        return 0

    def unsupported(*arguments):
        raise NVMLError

    return unsupported
"""


@dataclass
class Local:
    """A controller process over a state directory, and its client."""

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


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    """Two replicas of one GPU each, and a budget for a third."""
    (tmp_path / "pynvml.py").write_text(NVML)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    state = StateDir(tmp_path / "state").ensure()
    address = f"127.0.0.1:{free_ports(1)[0]}"
    model = sim_model(
        shapes={"small": {"gpus": 1}},
        modes={"multi-replica": {"shape": "small", "replicas": 2}},
        control={"mode": {"drain_timeout_s": 60}},
    )
    state.save(state.deployment_path, document(model, cluster={"controller": address}, budget={"gpus": 3}))
    client = ControllerClient(address, state.secret())
    made = Local(state, client)
    made.start()
    yield made
    if made.process.poll() is None:
        made.process.terminate()
        made.process.wait(60)
    client.close()


def stream(replica: Replica, secret: str, lines: list[str]) -> None:
    body = {"model": "m", "prompt": "hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        httpx.Client(headers={SECRET_HEADER: secret}, timeout=120, trust_env=False) as http,
        http.stream("POST", f"{replica.url}/v1/completions", json=body) as answer,
    ):
        lines.extend(line for line in answer.iter_lines() if line)


def test_a_replica_with_an_xid_ends_its_stream_and_is_replaced(local: Local, tmp_path: Path) -> None:
    before = local.ready(2)
    failed, other = before.values()
    lines: list[str] = []
    reading = threading.Thread(target=stream, args=(failed, local.state.secret(), lines))
    reading.start()
    until(lambda: lines or any(r.load.in_flight for r in local.client.fleet().replicas if r.id == failed.id))
    host = psutil.Process(failed.pid).ppid()
    (tmp_path / str(host)).write_text("79")

    def leaving() -> Replica | None:
        seen = {replica.id: replica for replica in local.client.fleet().replicas}
        found = seen.get(failed.id)
        return found if found is not None and found.state is ReplicaPhase.DRAINING else None

    assert until(leaving).reason == "XID 79 on GPU 0"
    until(lambda: not psutil.pid_exists(host))
    reading.join(60)
    assert lines[-1] == "data: [DONE]" and len(lines) > 400
    after = until(lambda: failed.id not in (now := local.ready(2)) and now)
    assert after[other.id].pid == other.pid and after[other.id].incarnation == 0
    status = local.client.status()
    assert status.models[0].target == 2
    assert any(f"{failed.id} drains: XID 79 on GPU 0" in event for event in status.events)
