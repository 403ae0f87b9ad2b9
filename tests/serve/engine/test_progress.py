"""Health is token progress too: an engine that holds requests must step."""

from __future__ import annotations

import pytest

from policy.errors import EngineFailed
from serve.engine.main import Progress


def test_an_engine_that_steps_is_healthy_however_long_it_is_busy() -> None:
    progress = Progress(10.0, 0.0)
    for now in range(100):
        progress.check(now, True, float(now))


def test_an_idle_engine_need_not_step() -> None:
    progress = Progress(10.0, 0.0)
    for now in range(100):
        progress.check(7, False, float(now))
    # The clock starts with the first request, not with the last step.
    progress.check(7, True, 105.0)
    progress.check(7, True, 109.0)


def test_a_busy_engine_that_stands_still_has_failed() -> None:
    progress = Progress(10.0, 0.0)
    progress.check(7, True, 5.0)
    progress.check(7, True, 15.0)
    with pytest.raises(EngineFailed, match="no engine step for 11 s with requests running"):
        progress.check(7, True, 16.0)
