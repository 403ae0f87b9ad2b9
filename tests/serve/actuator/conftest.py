"""Fixtures of the actuators' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.state_dir import StateDir


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state").ensure()
