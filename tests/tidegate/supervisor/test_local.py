"""A deployment of simulated replicas through the command line, without Ray."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.ports import free_ports
from tests.tidegate.conftest import Site, until
from tidegate.supervisor.children import ROOT

pytestmark = pytest.mark.process


def document(site: Site, *, least: int = 1, **sim: object) -> dict[str, Any]:
    made = site.shipped("sim.yaml")
    made["models"][0]["sim"] |= sim
    made["models"][0]["modes"]["multi-replica"]["replicas"] = {"min": least, "max": 4}
    return made


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    port, admin_port = free_ports(2)
    site = Site(tmp_path_factory.mktemp("sim"), port, admin_port, upstream="")
    site.up(document(site))
    yield site
    replicas = [replica["pid"] for replica in ready(site)]
    code, out, _ = site.tidegate("down")
    assert (code, "ended controller" in out) == (0, True)
    assert site.pids() == []
    assert not any(psutil.pid_exists(pid) for pid in replicas)
    code, out, err = site.tidegate("explain", "sim")
    assert (code, out[:5]) == (0, "sim  ")
    assert err.startswith(f"Nothing is running on {site.state}. Decisions are read from ")


def ready(site: Site) -> list[dict[str, Any]]:
    return [replica for replica in site.status()["fleet"]["replicas"] if replica["state"] == "ready"]


def test_scale_and_mode_change_the_running_replicas(sim: Site) -> None:
    (model,) = sim.status()["models"]
    assert (model["mode"], model["target"], model["ready"]) == ("multi-replica", 1, 1)
    code, out, _ = sim.tidegate("scale", "sim", "2", "--wait", "--json")
    assert (code, json.loads(out)["ready"]) == (0, 2)
    code, _, err = sim.tidegate("scale", "sim", "5")
    assert (code, "1 to 4" in err) == (5, True)
    code, out, _ = sim.tidegate("mode", "sim", "single-large", "--wait")
    assert (code, "single-large, 1 of 1 ready" in out) == (0, True)
    code, _, err = sim.tidegate("mode", "nobody", "single-large")
    assert (code, "nobody" in err) == (5, True)
    assert sim.tidegate("mode", "sim", "multi-replica", "--wait")[0] == 0
    assert sim.tidegate("mode", "sim", "auto")[0] == 0


def test_an_override_ends_after_its_duration_and_is_explained(sim: Site) -> None:
    # The response has the override: a later command may run after its end.
    code, out, _ = sim.tidegate("scale", "sim", "2", "--for", "3s", "--json")
    model = json.loads(out)
    assert (code, model["target"], model["override"]["count"]) == (0, 2, 2)
    until(lambda: sim.status()["models"][0]["decided_by"] == "static", "the override ends")
    assert sim.status()["models"][0]["target"] == 2

    code, out, err = sim.tidegate("explain", "sim", "--json")
    assert (code, err) == (0, "")
    newest = json.loads(out)["decisions"][-1]
    assert newest["decision"]["count"] == newest["situation"]["count"] == 2
    code, out, _ = sim.tidegate("explain", "--last", "1")
    assert (code, out.count("multi-replica x 2, unchanged")) == (0, 1)
    code, _, err = sim.tidegate("explain", "sim", "--at", "1d ago")
    assert (code, "no decision on sim" in err) == (1, True)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)])
def test_a_killed_or_stopped_controller_is_restarted_with_its_fleet(sim: Site, how: signal.Signals) -> None:
    before = [replica["id"] for replica in ready(sim)]
    pid = sim.workers()["controller"]
    os.kill(pid, how)
    if how is signal.SIGKILL:  # `status` works without the controller
        assert sim.status()["supervisor"]["phase"] == "ready"
    until(lambda: sim.workers()["controller"] not in (0, pid), "a new controller")
    until(lambda: [replica["id"] for replica in ready(sim)] == before, "the same fleet")


def test_apply_changes_what_the_controller_allows(sim: Site) -> None:
    changed = json.loads(sim.file.read_text())
    changed["models"][0]["modes"]["multi-replica"]["replicas"]["max"] = 2
    sim.file.write_text(json.dumps(changed))
    code, out, _ = sim.tidegate("apply", str(sim.file))
    assert (code, "models[sim].modes.multi-replica.replicas.max" in out) == (0, True)
    code, _, err = sim.tidegate("scale", "sim", "3")
    assert (code, "1 to 2" in err) == (5, True)


def test_start_timeout_reports_the_reason_and_stops_all_processes(site: Site) -> None:
    site.file.write_text(json.dumps(document(site, start_s=600)))
    for wait_s in (8, 60):  # a busy machine may need all of the first for the steps before the replica
        code, _, err = site.tidegate("up", str(site.file), "--no-ray", "--timeout-s", str(wait_s))
        if "replica: not ready" in err and "waiting for the controller" not in err:
            break
    assert code == 1
    assert f"replica: not ready after {wait_s} s: sim" in err
    assert "controller | " in err
    assert site.pids() == []


@pytest.mark.long
def test_an_orderly_stop_drops_overrides_and_a_crash_keeps_them(site: Site) -> None:
    elastic = document(site, least=0)
    site.up(elastic)
    assert site.tidegate("scale", "sim", "0", "--wait")[0] == 0
    os.kill(site.status()["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: site.pids() == [], "its processes follow their supervisor")

    # After a crash the overrides are kept: 0 desired replicas, so the start waits for none.
    assert "except sim (0 desired replicas)" in site.up(elastic)
    assert [(m["target"], m["ready"]) for m in site.status()["models"]] == [(0, 0)]
    assert site.tidegate("mode", "sim", "single-large", "--wait")[0] == 0

    # After an orderly stop the deployment file decides.
    assert site.tidegate("down")[0] == 0
    site.up(elastic)
    (model,) = site.status()["models"]
    assert (model["mode"], model["target"], model["ready"]) == ("multi-replica", 1, 1)


METER = """
import sys, time
from tests.serve.fake_nvml import FakeNvml, gpu

class Meter(FakeNvml):
    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return int(time.monotonic() * 300_000)

sys.modules[__name__] = Meter(gpu(mw=300_000))
"""


@pytest.mark.long
def test_usage_has_the_energy_of_a_gpu_that_measures_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver, host, controller, accounting process and ledger; the GPU takes 300 watts."""
    (site.folder / "pynvml.py").write_text(METER)
    monkeypatch.setenv("PYTHONPATH", f"{site.folder}:{ROOT}")
    began = time.monotonic()
    site.up(document(site))

    def measured() -> float:
        assert site.complete("sim").status_code == 200
        # A row comes some seconds after its first request.
        return sum(float(row["joules"]) for row in json.loads(site.tidegate("usage", "--json")[1])["usage"])

    joules = until(measured, "energy is in the ledger", 150)
    assert 0 < joules <= 300 * (time.monotonic() - began)
