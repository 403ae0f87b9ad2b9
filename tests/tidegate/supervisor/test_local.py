"""A deployment of our own replicas through the command line, without Ray."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import yaml

from tests.ports import free_ports
from tests.tidegate.conftest import Site, until
from tidegate.supervisor.children import ROOT

pytestmark = pytest.mark.process


def write(site: Site, **sim: object) -> None:
    """The shipped document on ports of this test's own, with changes to how the engine is simulated."""
    document = yaml.safe_load((ROOT / "deployments" / "sim.yaml").read_text())
    document["gateway"] |= {"port": site.port, "admin_port": site.admin_port}
    document["cluster"] |= {"controller": f"127.0.0.1:{free_ports(1)[0]}"}
    document["models"][0]["sim"] |= sim
    site.file.write_text(json.dumps(document))


@pytest.fixture
def sim(site: Site) -> Iterator[Site]:
    write(site)
    code, _, err = site.tidegate("up", str(site.file), "--no-ray", "--timeout-s", "150")
    assert (code, err) == (0, "")
    yield site


def test_a_start_that_takes_too_long_says_why_and_leaves_nothing(site: Site) -> None:
    write(site, start_s=600)
    for wait_s in (8, 60):  # a busy machine may need all of the first for what comes before the replica
        code, _, err = site.tidegate("up", str(site.file), "--no-ray", "--timeout-s", str(wait_s))
        if "replica: not ready" in err:
            break
    assert code == 1
    assert f"replica: not ready after {wait_s} s: sim" in err
    assert "controller | " in err
    assert site.pids() == []


def ready(site: Site) -> list[dict[str, Any]]:
    return [replica for replica in site.status()["fleet"]["replicas"] if replica["state"] == "ready"]


def test_the_simulated_deployment_from_up_to_down(sim: Site) -> None:
    (model,) = sim.status()["models"]
    assert (model["mode"], model["target"], model["ready"]) == ("multi-replica", 1, 1)

    code, out, _ = sim.tidegate("scale", "sim", "2", "--wait", "--json")
    assert code == 0
    assert json.loads(out)["ready"] == 2
    code, _, err = sim.tidegate("scale", "sim", "5")
    assert code == 5
    assert "1 to 4" in err

    code, out, _ = sim.tidegate("mode", "sim", "single-large", "--wait")
    assert code == 0
    assert "single-large, 1 of 1 ready" in out
    code, _, err = sim.tidegate("mode", "nobody", "single-large")
    assert code == 5
    assert "nobody" in err

    replicas = [replica["pid"] for replica in ready(sim)]
    code, out, _ = sim.tidegate("down")
    assert code == 0
    assert "ended controller" in out
    assert sim.pids() == []
    assert not any(psutil.pid_exists(pid) for pid in replicas)


def test_a_controller_that_dies_comes_back_with_its_fleet(sim: Site) -> None:
    before = [replica["id"] for replica in ready(sim)]
    pid = sim.workers()["controller"]
    os.kill(pid, signal.SIGKILL)
    # The status answers without it, too.
    assert sim.status()["supervisor"]["phase"] == "ready"
    until(lambda: sim.workers()["controller"] not in (0, pid), "a new controller")
    until(lambda: [replica["id"] for replica in ready(sim)] == before, "the same fleet")


def test_apply_changes_what_the_controller_allows(sim: Site) -> None:
    document = json.loads(sim.file.read_text())
    document["models"][0]["modes"]["multi-replica"]["replicas"]["max"] = 2
    sim.file.write_text(json.dumps(document))
    code, out, _ = sim.tidegate("apply", str(sim.file))
    assert code == 0
    assert "models[sim].modes.multi-replica.replicas.max" in out
    code, _, err = sim.tidegate("scale", "sim", "3")
    assert code == 5
    assert "1 to 2" in err


def test_what_is_set_by_hand_ends_with_its_term_and_is_explained(sim: Site) -> None:
    code, out, _ = sim.tidegate("scale", "sim", "2", "--for", "3s")
    assert code == 0
    assert "Set by hand until" in out
    (model,) = sim.status()["models"]
    assert (model["target"], model["decided_by"]) == (2, "by hand")
    until(lambda: sim.status()["models"][0]["decided_by"] == "static", "the term ends")
    assert sim.status()["models"][0]["target"] == 2

    code, out, _ = sim.tidegate("explain", "sim", "--json")
    assert code == 0
    newest = json.loads(out)["decisions"][-1]
    assert newest["decision"]["count"] == newest["situation"]["count"] == 2
    code, out, _ = sim.tidegate("explain", "--last", "1")
    assert (code, out.count("multi-replica x 2, as before")) == (0, 1)
    code, _, err = sim.tidegate("explain", "sim", "--at", "1d ago")
    assert code == 1
    assert "no decision on sim" in err


def elastic(site: Site) -> None:
    """A document whose first mode may have no replica."""
    write(site)
    document = json.loads(site.file.read_text())
    document["models"][0]["modes"]["multi-replica"]["replicas"] = {"min": 0, "max": 4}
    site.file.write_text(json.dumps(document))


@pytest.mark.long
def test_an_orderly_stop_forgets_targets_and_a_crash_keeps_them(site: Site) -> None:
    elastic(site)
    up = ("up", str(site.file), "--no-ray", "--timeout-s", "150")
    assert site.tidegate(*up)[0] == 0
    assert site.tidegate("scale", "sim", "0", "--wait")[0] == 0
    os.kill(site.status()["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: site.pids() == [], "what it started follows its supervisor")

    # After a crash: as it was last steered. Nothing is wanted, so nothing is waited for.
    code, out, err = site.tidegate(*up)
    assert (code, err) == (0, "")
    assert "but sim, whose target is 0" in out
    assert [(m["target"], m["ready"]) for m in site.status()["models"]] == [(0, 0)]
    assert site.tidegate("mode", "sim", "single-large", "--wait")[0] == 0

    # After an orderly stop: as the document says.
    assert site.tidegate("down")[0] == 0
    assert site.tidegate(*up)[0] == 0
    (model,) = site.status()["models"]
    assert (model["mode"], model["target"], model["ready"]) == ("multi-replica", 1, 1)
