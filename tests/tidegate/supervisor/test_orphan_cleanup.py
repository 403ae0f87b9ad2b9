"""``down`` after a killed supervisor: recorded processes, and applications on a cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from policy.wire.controller import LeaderStatus
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tidegate.cli import group
from tidegate.supervisor import command_lines
from tidegate.supervisor.children import ProcessSpec
from tidegate.supervisor.process_record import ProcessRecord, RecordedProcess

SIM = {
    "name": "sim", "engine": "sim", "shapes": {"small": {"cpus": 1}},
    "modes": {"multi-replica": {"shape": "small"}},
}  # fmt: skip
EXTERNAL = {"name": "e", "engine": "external", "urls": ["http://127.0.0.1:1"]}
JOINED = {"address": "10.0.0.1:6379", "controller": "10.0.0.1:7070"}


@dataclass
class Site:
    """A state directory of a killed supervisor, and a fake of the cluster cleanup tool."""

    state: StateDir
    child: subprocess.Popen[bytes]
    exit_code: int = 0

    def left(self, model: object, cluster: dict[str, str], *recorded: str) -> None:
        self.state.save(self.state.deployment_path, {"models": [model], "cluster": cluster})
        for path in self.kept:
            self.state.save(path, {})
        pid = self.child.pid
        living = RecordedProcess(name=recorded[0], pid=pid, created=psutil.Process(pid).create_time())
        dead = [RecordedProcess(name=name, pid=2**22 + 1, created=1.0) for name in recorded[1:]]
        self.state.save(self.state.processes_path, [living, *dead])

    @property
    def kept(self) -> list[Path]:
        """What the controller keeps until an orderly stop."""
        names = ("targets", "hosts", "gpu-groups", "beds", "controller-run")
        return [self.state.root / f"{name}.json" for name in names]

    def tool(self, state: StateDir, verb: str) -> ProcessSpec:
        code = (
            f"import json, sys; open({str(self.calls)!r}, 'a').write({verb!r});"
            f"print(json.dumps({{'error': 'it is away'}})); sys.exit({self.exit_code})"
        )
        return ProcessSpec(name="cluster", argv=(sys.executable, "-c", code), env={})

    @property
    def calls(self) -> Path:
        return self.state.root / "calls"

    def down(self) -> Result:
        return CliRunner().invoke(group, ["--state-dir", str(self.state.root), "down"])


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        made = Site(StateDir(tmp_path).ensure(), child)
        monkeypatch.setattr(command_lines, "cluster", made.tool)
        yield made
        child.kill()


def test_down_cleans_a_joined_cluster_and_clears_the_record(site: Site) -> None:
    site.left(SIM, JOINED, "gateway-0", "supervisor")
    done = site.down()
    assert done.exit_code == 0
    assert "ended gateway-0" in done.output
    assert "10.0.0.1:6379" in done.output
    assert site.calls.read_text() == "stop"
    assert site.child.wait(5) != 0
    assert not any(path.exists() for path in site.kept)
    # Everything has ended: a second `down` does not contact the cluster.
    assert site.down().output == "Nothing is running.\n"
    assert site.calls.read_text() == "stop"


def test_a_failed_cleanup_of_the_cluster_can_be_repeated(site: Site) -> None:
    site.left(SIM, JOINED, "gateway-0")
    site.exit_code = 1
    done = site.down()
    assert "it is away" in str(done.exception)
    assert ProcessRecord(site.state).entries
    assert site.state.targets_path.exists()
    site.exit_code = 0
    assert site.down().exit_code == 0
    assert site.calls.read_text() == "stopstop"


@pytest.mark.parametrize(
    ("model", "cluster", "recorded"),
    [(SIM, {"address": "local"}, "ray"), (SIM, JOINED, "controller"), (EXTERNAL, JOINED, "gateway-0")],
    ids=["a head of our own", "without Ray", "nothing of our own"],
)
def test_other_clusters_are_kept(site: Site, model: object, cluster: dict[str, str], recorded: str) -> None:
    site.left(model, cluster, recorded)
    assert site.down().exit_code == 0
    assert not site.calls.exists()


def test_down_without_a_record_does_not_contact_the_cluster(site: Site) -> None:
    site.state.save(site.state.deployment_path, {"models": [SIM], "cluster": JOINED})
    assert site.down().output == "Nothing is running.\n"
    assert not site.calls.exists()


@pytest.mark.parametrize("leads", [True, False])
def test_replicas_of_an_elected_controller_end_unless_another_one_answers(
    site: Site, monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    answer = LeaderStatus(address="10.0.0.2:7070", leads=True) if leads else None
    monkeypatch.setattr(ControllerClient, "leaders", lambda client: {"10.0.0.2:7070": answer})
    site.left(SIM, {"controller": "10.0.0.1:7070,10.0.0.2:7070"}, "python", "controller")
    assert site.down().exit_code == 0
    assert (site.child.poll() is None) == leads
    # A later one finds it, once nobody answers.
    assert bool(ProcessRecord(site.state).entries) == leads
