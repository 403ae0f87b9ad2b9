"""The seeds pass, and a minute of fuzzing finds nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ["body_reader", "http_server"]


@pytest.mark.parametrize("name", TARGETS)
def test_seeds(name: str) -> None:
    target = importlib.import_module(f"tests.fuzz.{name}")
    for seed in target.SEEDS:
        target.check(seed)


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
def test_half_a_minute_of_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz.run", name, "--seconds", "30"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
