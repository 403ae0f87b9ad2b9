"""``tidegate doctor``: the order of results, their advice, JSON and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner, Result

from policy.types import FleetSnapshot, ReplicaPhase
from policy.wire.controller import FLEET, GPUS
from policy.wire.controller_reports import GpuReport
from serve.controller.client import ControllerClient
from tests.ports import free_ports
from tests.serve.fake_nvml import FakeNvml, gpu
from tests.serve.replicas import replica
from tests.tidegate.conftest import Site
from tidegate.cli import group
from tidegate.commands.deployment.doctor import reports_of_awake
from tidegate.doctor import check_suite
from tidegate.doctor.finding import Finding

GPU_MODEL: dict[str, Any] = {
    "name": "m", "source": "org/m",
    "shapes": {"small": {"gpus": 1}, "large": {"gpus": 2, "tensor_parallel": 2}},
    "modes": {"many": {"shape": "small", "replicas": {"min": 1, "max": 2}},
              "one": {"shape": "large", "replicas": {"min": 1, "max": 1}}},
}  # fmt: skip
SIM_MODEL = {
    "name": "m", "engine": "sim", "shapes": {"small": {"cpus": 1}},
    "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}}},
}  # fmt: skip

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command on a machine without other Ray clusters, with the given GPUs."""
    monkeypatch.setattr(check_suite.preflight, "foreign_ray", lambda ours: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def invoke(
        *words: str,
        nvml: FakeNvml | None = None,
        model: dict[str, Any] | None = None,
        cluster: dict[str, Any] | None = None,
    ) -> Result:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(check_suite, "_has_gpu", lambda: nvml is not None)
        if model is not None:
            client, admin, controller, gcs, dashboard = free_ports(5)
            local = {"controller": f"127.0.0.1:{controller}", "gcs_port": gcs, "dashboard_port": dashboard}
            gateway = {"port": client, "admin_port": admin}
            file = tmp_path / "deployment.yaml"
            file.write_text(json.dumps({"models": [model], "cluster": cluster or local, "gateway": gateway}))
            words = (str(file), *words)
        return CliRunner().invoke(group, ["--state-dir", str(tmp_path / "state"), "doctor", *words])

    return invoke


def findings(result: Result) -> dict[str, Finding]:
    answer = json.loads(result.output)
    found = {each["check"]: Finding(**each) for each in answer["findings"]}
    assert answer["ok"] == (result.exit_code == 0) == all(each.level != "error" for each in found.values())
    return found


def test_a_machine_without_gpus_is_healthy(run: Run) -> None:
    result = run("--json")
    assert result.exit_code == 0, result.output
    found = findings(result)
    assert {name for name, each in found.items() if each.level == "not applicable"} == {
        "GPU driver", "GPUs of replicas", "ports", "certificates", "network between nodes",
    }  # fmt: skip
    assert all(bool(each.advice) == (each.level in ("error", "warning")) for each in found.values())


def test_a_deployment_that_needs_gpus_fails_without_them(run: Run) -> None:
    result = run("--json", model=GPU_MODEL)
    assert result.exit_code == 6
    found = findings(result)
    assert found["GPU driver"].level == "error"
    assert found["memory"].found.endswith("not here yet: m")
    assert found["ports"].level == "ok"


def test_gpus_are_checked_against_the_shapes(run: Run) -> None:
    one = run("--json", nvml=FakeNvml(gpu()), model=GPU_MODEL)
    assert one.exit_code == 6
    assert "got '2 GPUs', expected at most 1 GPUs" in findings(one)["GPUs"].found
    two = findings(run("--json", nvml=FakeNvml(gpu(), gpu(), linked=False, ancestor=10), model=GPU_MODEL))
    assert two["GPUs"].level == "ok"
    assert two["GPU topology"].level == "warning"


def test_the_worst_is_printed_first_with_its_advice(run: Run) -> None:
    result = run(nvml=FakeNvml(gpu(ecc=[0, 1])))
    assert result.exit_code == 6
    lines = result.output.splitlines()
    assert lines[0].split() == ["result", "check", "found"]
    assert " ".join(lines[1].split()) == "error GPU memory errors GPU 0: 1 uncorrected ECC errors"
    assert lines[2].lstrip().startswith("-> reset or restart the machine")
    assert lines[-1].startswith("1 error, ")


def test_an_invalid_file_is_refused(run: Run) -> None:
    result = run(model={**GPU_MODEL, "shapes": {}})
    assert type(result.exception).__name__ == "ConfigError"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('print(\'{"error": "no token"}\')', "not measured: no token"),
        ("raise RuntimeError('the actor died')", "not measured: RuntimeError: the actor died"),
        ("pass", "not measured: no answer"),
    ],
)
def test_a_measurement_of_the_network_that_fails_is_a_warning(
    run: Run, monkeypatch: pytest.MonkeyPatch, code: str, found: str
) -> None:
    measure = subprocess.run
    monkeypatch.setattr(
        check_suite.subprocess, "run", lambda line, **rest: measure([line[0], "-c", code], **rest)
    )
    joined = {"address": "127.0.0.1:1", "controller": "127.0.0.1:7070"}
    network = findings(run("--json", model=SIM_MODEL, cluster=joined))["network between nodes"]
    assert (network.level, network.found) == ("warning", found)


@pytest.mark.process
def test_a_running_deployment_holds_its_own_ports(site: Site) -> None:
    site.up(site.shipped("sim.yaml"))
    code, out, _ = site.tidegate("doctor", "--json")
    found = {each["check"]: each for each in json.loads(out)["findings"]}
    assert code == 0, out
    assert f"{site.port}, {site.admin_port}" in found["ports"]["found"]
    assert found["ports"]["found"].endswith("in use by this deployment")
    assert found["GPUs of replicas"]["found"] == "no replica reports GPUs"


def test_gpus_that_a_sleeping_replica_has_lent_are_reported_once() -> None:
    power = GpuReport(watts=250.0)
    fleet = FleetSnapshot(
        epoch=1.0, version=1, at=1.0,
        replicas=(replica("awake"), replica("asleep", state=ReplicaPhase.ASLEEP)),
    )  # fmt: skip
    answers: dict[str, object] = {GPUS: {"awake": power, "asleep": power, "new": power}, FLEET: fleet}

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=msgspec.json.encode(answers[request.url.path]))

    client = ControllerClient("c:1", "s", transport=httpx.MockTransport(answer))
    assert reports_of_awake(client).keys() == {"awake", "new"}
    client.close()
