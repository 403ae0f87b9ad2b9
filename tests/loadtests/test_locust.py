"""Locust against simulated replicas: the measurements of users agree with the gateway's metrics."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.ports import free_ports
from tidegate.supervisor.children import ROOT

pytestmark = pytest.mark.process
ROUNDS = 3


@dataclass(frozen=True)
class Deployment:
    """A running deployment and a folder for what a run writes."""

    folder: Path
    port: int
    admin_port: int

    def tidegate(self, *arguments: str) -> str:
        return _run("-m", "tidegate", *arguments, folder=self.folder).stdout

    def locust(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        urls = [f"--host=http://127.0.0.1:{self.port}", f"--admin-url=http://127.0.0.1:{self.admin_port}"]
        common = ["-f", "loadtests/locustfile.py", "--headless", "--only-summary", *urls]
        return _run("-m", "locust", *common, *arguments, folder=self.folder, check=False)


def _run(*arguments: str, folder: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TIDEGATE_STATE_DIR": str(folder / "state")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        capture_output=True,
        timeout=280,
        check=check,
    )


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    port, admin_port, controller = free_ports(3)
    folder = tmp_path_factory.mktemp("load")
    # As it ships, on ports of its own.
    document = yaml.safe_load((ROOT / "deployments" / "sim.yaml").read_text())
    document["cluster"] |= {"controller": f"127.0.0.1:{controller}"}
    document["gateway"] |= {"port": port, "admin_port": admin_port}
    (folder / "deployment.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    made = Deployment(folder, port, admin_port)
    try:
        made.tidegate("up", str(folder / "deployment.yaml"), "--no-ray", "--timeout-s", "150")
        yield made
    finally:
        made.tidegate("down")


def rows(path: Path) -> dict[str, dict[str, str]]:
    with path.open(newline="") as file:
        return {next(iter(row.values())): row for row in csv.DictReader(file)}


def test_the_latencies_of_users_and_gateway_agree(deployment: Deployment) -> None:
    for number in range(ROUNDS):
        prefix = deployment.folder / f"run{number}"
        # Every option of the requests at its default.
        ran = deployment.locust("-u", "8", "-r", "8", "-t", "10s", "--csv", str(prefix))
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "SLO: TTFT <= 1 s and mean ITL <= 0.1 s" in ran.stdout

        every = rows(prefix.with_name(f"{prefix.name}_slo.csv"))["all"]
        assert int(every["Requests"]) >= 8
        assert every["Failed"] == "0"
        compared = rows(prefix.with_name(f"{prefix.name}_gateway.csv"))
        assert compared["requests served"]["users"] == compared["requests served"]["gateway"]
        assert compared["streams begun"]["users"] == compared["streams begun"]["gateway"]
        figures = [compared[quantity] for quantity in ("TTFT mean", "E2E mean", "goodput of streams")]
        difference = max(abs(float(figure["difference (%)"])) for figure in figures)
        # Other load of the machine delays the users, not the gateway.
        if every["SLO met (%)"] == "100.0" and difference <= 5:
            break
    assert every["SLO met (%)"] == "100.0"
    assert difference <= 5, ran.stdout

    kinds = {(row["Type"], row["Name"]) for row in _stats(prefix)}
    assert {("TTFT", "chat, streamed"), ("ITL", "chat, streamed"), ("E2E", "chat, streamed")} <= kinds
    # Locust's own total counts requests: no token gap and no first token is one.
    total = next(row for row in _stats(prefix) if row["Name"] == "Aggregated")
    assert total["Request Count"] == every["Requests"]


def _stats(prefix: Path) -> list[dict[str, str]]:
    with prefix.with_name(f"{prefix.name}_stats.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.long
def test_a_missed_slo_sets_the_exit_code(deployment: Deployment) -> None:
    limits = ["--slo-ttft-s", "0.001", "--slo-attainment", "0.5", "--stream-share", "1"]
    ran = deployment.locust("-u", "2", "-t", "8s", "--max-tokens", "4", *limits)
    assert ran.returncode == 1
    assert "0.000 of the requests met the SLO; expected 0.5" in ran.stderr


@pytest.mark.long
def test_worker_processes_report_all_requests_once(deployment: Deployment) -> None:
    prefix = deployment.folder / "shared"
    load = ["-u", "4", "-r", "4", "-t", "8s", "--processes", "2", "--max-tokens", "8", "--abort-share", "0.3"]
    master = str(free_ports(1)[0])
    ports = ["--master-bind-port", master, "--master-port", master]
    ran = deployment.locust(*load, *ports, "--csv", str(prefix))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    compared = rows(prefix.with_name("shared_gateway.csv"))
    for quantity in ("requests served", "streams begun"):
        assert compared[quantity]["users"] == compared[quantity]["gateway"], ran.stdout
