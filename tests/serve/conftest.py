"""Fixtures of the control plane's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from store.state_dir import StateDir
from tests.serve.plane import Plane


@pytest.fixture
def plane(tmp_path: Path) -> Plane:
    return Plane(StateDir(tmp_path))
