"""The record of the controller's runs: a delay after failures in a row, and the last error."""

from __future__ import annotations

from pathlib import Path

from serve.controller.crash_loop_backoff import BACKOFF, STABLE_S, last_run, record_error, record_start
from store.state_dir import StateDir


def test_failures_in_a_row_delay_the_next_start_and_a_stable_run_ends_the_row(tmp_path: Path) -> None:
    state, now = StateDir(tmp_path).ensure(), 1000.0
    assert last_run(state) is None
    assert record_start(state, now) == 0.0
    for failures in (1, 2, 3, 20):
        record_error(state, AssertionError("broken"))
        while (run := last_run(state)) is not None and run.failures < failures:
            delay_s = record_start(state, now)
            now += delay_s + 1.0
        assert delay_s == BACKOFF.delay_s(failures) <= 10.0
    assert str(run) == "the controller ended 20 times: AssertionError: broken"
    now += STABLE_S
    assert record_start(state, now) == BACKOFF.delay_s(1)
    # Killed, which leaves no error.
    assert str(last_run(state)) == "the controller ended 1 times: see the log controller"


def test_a_record_of_another_version_is_ignored(tmp_path: Path) -> None:
    state = StateDir(tmp_path).ensure()
    state.controller_run_path.write_text("[]")
    assert record_start(state, 1.0) == 0.0
