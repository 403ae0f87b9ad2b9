"""The first run of a user: ``make up`` in a fresh clone, the printed request, ``make down``."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.e2e.first_question import ask
from tests.e2e.stack import ROOT
from tidegate.supervisor.preflight import foreign_ray

# What a first and a second `make up` may take on two cores.
FIRST_S = 600.0
SECOND_S = 90.0


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_make_up_starts_a_deployment_from_a_fresh_clone(tmp_path: Path) -> None:
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu.yaml").read_text())
    ports = [8265, 6379, int(document["cluster"]["controller"].rpartition(":")[2])]
    ports += [document["gateway"]["port"], document["gateway"]["admin_port"]]
    if taken := [port for port in ports if is_open(port)]:
        pytest.skip(f"ports of the shipped deployment are taken: {taken}")
    if other := foreign_ray(()):
        pytest.skip(other)
    git, builder = shutil.which("git"), shutil.which("make")
    if git is None or builder is None or not (ROOT / ".git").exists():
        pytest.skip("needs git, make and a git checkout")

    checkout = tmp_path / "checkout"
    subprocess.run([git, "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    environment = fresh_environment(tmp_path)

    def make(target: str, within_s: float) -> str:
        done = subprocess.run(
            [builder, target],
            cwd=checkout, env=environment, timeout=within_s + 60, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    def up(within_s: float) -> None:
        began = time.monotonic()
        output = make("up", within_s)
        took_s = time.monotonic() - began
        assert "Paris" in ask(output, tmp_path)
        assert took_s <= within_s, f"make up took {took_s:.0f} s"

    try:
        up(FIRST_S)
        # It reports that it already runs.
        assert "already running" in make("up", SECOND_S)
        make("down", 120)
        assert not any(map(is_open, ports))
        up(SECOND_S)
    finally:
        make("down", 120)
    assert not any(map(is_open, ports))


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def fresh_environment(folder: Path) -> dict[str, str]:
    prefixes = ("TIDEGATE_", "RAY_", "XDG_", "VIRTUAL_ENV", "PYTHON")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(prefixes)}
    home = folder / "home"
    home.mkdir()
    return kept | {
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": os.environ.get("XDG_CONFIG_HOME", str(Path.home() / ".config")),
        "TIDEGATE_ENGINE": "cpu",
    }
