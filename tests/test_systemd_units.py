"""The systemd units name commands and options that exist, and systemd accepts them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tidegate.cli import group

UNITS = sorted((Path(__file__).resolve().parents[1] / "deployments" / "systemd").glob("*.service"))
_PROGRAM = "/opt/tidegate/.venv/bin/tidegate"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_the_command_of_a_unit_exists(unit: Path) -> None:
    match = re.search(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    assert match is not None
    program, command, *words = shlex.split(match[1])
    assert program == _PROGRAM
    known = CliRunner().invoke(group, [command, "--help"])
    assert known.exit_code == 0
    assert all(word in known.output for word in words if word.startswith("--"))


def test_caches_are_in_a_folder_that_systemd_makes() -> None:
    """With ProtectSystem=strict nothing else of /var/cache can be written, the hub's own cache included."""
    for unit in UNITS:
        settings = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line[1:])
        caches = re.findall(r"_CACHE_\w+=(\S+)", settings.get("Environment", ""))
        assert all(each.startswith(f"/var/cache/{settings['CacheDirectory']}") for each in caches), unit.name
    assert "XDG_CACHE_HOME=" in (UNITS[0].parent / "tidegate.service").read_text()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_a_unit(unit: Path, tmp_path: Path) -> None:
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd is not installed")
    # It also looks for the program.
    checked = tmp_path / unit.name
    checked.write_text(unit.read_text().replace(_PROGRAM, "/bin/true"))
    found = subprocess.run(
        [analyze, "verify", "--man=no", str(checked)], capture_output=True, text=True, check=False
    )
    mine = [line for line in (found.stdout + found.stderr).splitlines() if unit.name in line]
    assert not mine, mine
