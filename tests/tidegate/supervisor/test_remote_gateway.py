"""`tidegate gateway`: a second gateway host for the controller of the first."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.ports import free_ports
from tests.tidegate.conftest import Command, Site, until

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.fixture
def second(site: Site, tmp_path: Path) -> Iterator[Site]:
    port, admin_port = free_ports(2)
    folder = tmp_path / "second"
    folder.mkdir()
    made = replace(site, folder=folder, port=port, admin_port=admin_port)
    yield made
    made.tidegate("down")
    assert made.pids() == []


def start(first: Site, second: Site, secret: Path) -> Command:
    controller = json.loads(first.file.read_text())["cluster"]["controller"]
    return second.popen(
        "gateway", "--controller", controller, "--secret-file", str(secret), "--workers", "1",
        "--port", str(second.port), "--admin-port", str(second.admin_port), "--timeout-s", "60",
    )  # fmt: skip


def is_ready(site: Site) -> bool:
    supervisor = site.status()["supervisor"]
    return supervisor is not None and supervisor["phase"] == "ready"


def test_a_gateway_of_another_host_serves_follows_and_serves_on(site: Site, second: Site) -> None:
    document = site.shipped("sim.yaml")
    document["gateway"]["drain_delay_s"] = 3.0
    site.up(document)
    wrong = second.folder / "wrong"
    wrong.write_text("x" * 32)
    with start(site, second, wrong) as command:
        _, err = command.communicate(timeout=60)
        assert command.returncode != 0
        assert "the internal secret is missing or wrong" in err
    with start(site, second, site.state / "secret") as command:
        until(lambda: is_ready(second), "the second gateway is ready")
        assert second.status()["supervisor"]["actuator"] == "remote"
        assert second.complete("sim").status_code == 200
        # It takes a change that is applied at the first host, and refuses one of its own.
        document["tenants"] = [{"name": "web", "keys_sha256": ["0" * 64]}]
        site.file.write_text(json.dumps(document))
        assert second.tidegate("apply", str(site.file))[0] != 0
        assert site.tidegate("apply", str(site.file))[0] == 0
        until(lambda: second.complete("sim").status_code == 401, "the second host asks for keys")
        del document["tenants"]
        site.file.write_text(json.dumps(document))
        assert site.tidegate("apply", str(site.file))[0] == 0
        until(lambda: second.complete("sim").status_code == 200, "keys are no longer needed")
        # The first host dies at once: the second one keeps what it knew, also over a restart of its worker.
        for pid in site.pids():
            os.kill(pid, signal.SIGSTOP)
        try:
            os.kill(second.workers()["gateway-0"], signal.SIGKILL)
            until(lambda: second.status()["fleet"]["models"], "the restarted worker knows the models")
        finally:
            for pid in site.pids():
                os.kill(pid, signal.SIGCONT)
        until(lambda: second.complete("sim").status_code == 200, "the second host serves again")
        # It stops as load balancers expect: not ready, then serving for a while, then gone.
        command.send_signal(signal.SIGTERM)
        ready = f"http://127.0.0.1:{second.admin_port}/readyz"
        until(lambda: httpx.get(ready, trust_env=False).status_code == 503, "it is not ready any more")
        assert second.complete("sim").status_code == 200
        command.communicate(timeout=60)
        assert command.returncode == 0
