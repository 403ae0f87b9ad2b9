"""The health check by progress: an engine that has requests must step."""

from __future__ import annotations

import pytest

from policy.errors import EngineFailed
from serve.engine.engine_server import EngineWatchdog


def test_only_an_engine_with_requests_must_make_steps() -> None:
    progress = EngineWatchdog(0.0)
    for now in range(100):
        progress.check(now, True, float(now), 10.0)
    for now in range(100, 200):
        progress.check(7, False, float(now), 10.0)
    progress.check(7, True, 205.0, 10.0)
    progress.check(7, True, 209.0, 10.0)
    with pytest.raises(EngineFailed, match="no engine step for 11 s with requests running"):
        progress.check(7, True, 210.0, 10.0)
    progress.check(7, True, 210.0, 50.0)
