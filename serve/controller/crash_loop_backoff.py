"""The runs of the controller, on disk: how often in a row it ended soon, and its last error.

Ray restarts an actor at once and without limit, and does not say why it ended.
"""

from __future__ import annotations

import msgspec

from policy.stats.backoff import Backoff, failures_after
from serve.state.reconcile_errors import describe
from store.state_dir import StateDir

BACKOFF = Backoff(0.1, 10.0)
# A run of this many seconds ends a row of failures.
STABLE_S = 30.0


class ControllerRun(msgspec.Struct, frozen=True, kw_only=True):
    """The run that began last (``started_at``, Unix seconds), after ``failures`` in a row.

    ``error`` is that of the last failure, empty if it was killed.
    """

    started_at: float
    failures: int = 0
    error: str = ""

    def __str__(self) -> str:
        return f"the controller ended {self.failures} times: {self.error or 'see the log controller'}"


def last_run(state: StateDir) -> ControllerRun | None:
    """The run that began last; ``None`` before the first one, and after an orderly stop."""
    try:
        return state.load(state.controller_run_path, ControllerRun)
    except msgspec.DecodeError:  # of another version
        return None


def record_start(state: StateDir, now: float) -> float:
    """Record a start; returns the seconds to wait before it, after runs that ended soon."""
    last, delay_s = last_run(state), 0.0
    run = ControllerRun(started_at=now)
    if last is not None:
        lived_s = now - last.started_at
        failures = failures_after(last.failures, lived_s, STABLE_S)
        delay_s = BACKOFF.delay_s(failures)
        error = last.error if lived_s < STABLE_S else ""
        run = ControllerRun(started_at=now + delay_s, failures=failures, error=error)
    state.save(state.controller_run_path, run)
    return delay_s


def record_error(state: StateDir, error: BaseException) -> None:
    """Record what ended the current run."""
    last = last_run(state) or ControllerRun(started_at=0.0)
    state.save(state.controller_run_path, msgspec.structs.replace(last, error=describe(error)))
