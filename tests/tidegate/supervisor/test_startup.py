"""The gateway is there before weights are, and a head of Ray that dies is started again."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from policy.deployment_file.parse import parse
from policy.errors import ModelUnavailable
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.serve.sim_documents import document
from tidegate.supervisor import command_lines, preflight, startup
from tidegate.supervisor.children import ProcessSpec, SupervisedProcess
from tidegate.supervisor.process_record import ProcessRecord
from tidegate.supervisor.progress_events import ProgressEvent, ProgressLog
from tidegate.supervisor.startup import Startup

LISTEN = "import socket, time; s = socket.create_server(('127.0.0.1', {})); time.sleep(600)"


def running(name: str, code: str) -> ProcessSpec:
    return ProcessSpec(name=name, argv=(sys.executable, "-c", code), env={})


@pytest.mark.process
async def test_a_head_that_dies_on_a_full_disk_is_back_with_its_controller_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, admin_port, controller, gcs, dashboard = free_ports(5)
    ports = {"gcs_port": gcs, "dashboard_port": dashboard}
    deployment = parse(
        document(
            gateway={"port": port, "admin_port": admin_port},
            cluster={"controller": f"127.0.0.1:{controller}", **ports},
        )
    )
    state = StateDir(tmp_path).ensure()
    calls = state.root / "calls"
    monkeypatch.setattr(startup, "RETRY_S", 0.01)
    monkeypatch.setattr(preflight, "foreign_ray", lambda ours: None)
    monkeypatch.setattr(command_lines, "ray_head", lambda *_: running("ray", LISTEN.format(gcs)))
    monkeypatch.setattr(
        command_lines,
        "cluster",
        lambda _, verb: running("cluster", f"open({str(calls)!r}, 'a').write({verb!r})"),
    )
    record = ProcessRecord(state)
    # What runs already, this process too, is nothing that a head left.
    this = psutil.Process()
    record.started.update(process.pid for process in (this, *this.children(recursive=True)))
    events: list[str] = []

    def child(spec: ProcessSpec) -> SupervisedProcess:
        """The head, and nothing else of the deployment."""
        started = spec if spec.name == "ray" else running(spec.name, "import time; time.sleep(600)")
        return SupervisedProcess(started, state, record, note=events.append)

    def take(event: ProgressEvent) -> None:
        events.append(event.message)

    async def until(told: str) -> None:
        async with asyncio.timeout(60):
            while not any(told in event for event in events):  # noqa: ASYNC110 - events of processes
                await asyncio.sleep(0.01)

    starts = Startup(
        deployment=deployment, state=state, record=record, progress=ProgressLog(take), ray=True, remote=False,
        address="", host="", timeout_s=60.0, servers_timeout_s=60.0, child=child,
        controller_client=lambda: ControllerClient(f"127.0.0.1:{controller}", state.secret()),
    )  # fmt: skip
    starting = asyncio.create_task(starts.run())
    try:
        await until("controller at ")
        # Neither the record nor a log can be written.
        refusing = (state.processes_path, state.logs / "cluster.log")
        for path in refusing:
            path.unlink()
            path.mkdir()
        assert starts.head is not None
        starts.head.kill()
        await until("ray cannot be started: [Errno")
        refusing[0].rmdir()
        await until("the controller is not back yet: [Errno")
        refusing[1].rmdir()
        await until("the controller is back")
        assert calls.read_text() == "startstart"
        assert starts.head.pid
    finally:
        starting.cancel()
        starts.stop_recovering()
        await asyncio.gather(starting, return_exceptions=True)
        await asyncio.gather(*(each.stop(60.0) for each in starts.children))
        for sock in starts.sockets:
            sock.close()


@pytest.mark.process
async def test_the_gateway_runs_while_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, admin_port, controller = free_ports(3)
    model = {
        "name": "m",
        "source": "hf:org/m",
        "shapes": {"small": {"cpus": 1}},
        "modes": {"one": {"shape": "small"}},
    }
    deployment = parse(
        {
            "models": [model],
            "gateway": {"port": port, "admin_port": admin_port, "allow_unauthenticated": True},
            "cluster": {"controller": f"127.0.0.1:{controller}"},
        }
    )
    state = StateDir(tmp_path).ensure()
    record = ProcessRecord(state)
    there: list[str] = []

    def prepare(_: StateDir, model: str) -> ProcessSpec:
        there.extend(each.spec.name for each in starts.children)
        return running("models", "raise SystemExit(1)")

    def child(spec: ProcessSpec) -> SupervisedProcess:
        started = running(spec.name, "import time; time.sleep(600)")
        return SupervisedProcess(started, state, record, note=lambda _: None)

    monkeypatch.setattr(preflight, "missing_package", lambda _: None)
    monkeypatch.setattr(command_lines, "prepare_model", prepare)
    starts = Startup(
        deployment=deployment, state=state, record=record, progress=ProgressLog(lambda _: None), ray=False,
        remote=False, address="", host="", timeout_s=60.0, servers_timeout_s=60.0, child=child,
        controller_client=lambda: ControllerClient(f"127.0.0.1:{controller}", state.secret()),
    )  # fmt: skip
    try:
        with pytest.raises(ModelUnavailable):
            await starts.run()
        assert there == ["gateway-0", "gateway-1", "accounting"]
    finally:
        await asyncio.gather(*(each.stop(60.0) for each in starts.children))
        for sock in starts.sockets:
            sock.close()
