"""Exit codes: their meanings, and the code of each error."""

from __future__ import annotations

from enum import IntEnum

from policy.errors import (
    AccessRefused,
    AccessUnknown,
    AdapterRefused,
    AdapterUnknown,
    ConfigError,
    PreconditionFailed,
    SwitchRefused,
    TargetError,
    TraceError,
    Unreachable,
)


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    INVALID = 3
    NOT_RUNNING = 4
    REFUSED = 5
    PRECONDITION = 6
    INACCURATE = 7
    ROLLED_BACK = 8
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "ok",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "usage error",
    ExitCode.INVALID: "invalid deployment file, workload or trace",
    ExitCode.NOT_RUNNING: "nothing is running, or it does not answer",
    ExitCode.REFUSED: "refused: replica count, mode switch, adapter, key, or a change that needs down and up",
    ExitCode.PRECONDITION: "precondition not met: port, memory, another Ray cluster, or external servers",
    ExitCode.INACCURATE: "calibration written, but its error is high",
    ExitCode.ROLLED_BACK: "applied and rolled back: the new revision did not start (apply --wait)",
    ExitCode.INTERRUPTED: "interrupted",
}

_BY_ERROR: dict[ExitCode, tuple[type[Exception], ...]] = {
    ExitCode.INVALID: (ConfigError, TraceError),
    ExitCode.NOT_RUNNING: (Unreachable,),
    ExitCode.REFUSED: (
        *(TargetError, SwitchRefused, AdapterRefused, AdapterUnknown),
        *(AccessRefused, AccessUnknown),
    ),
    ExitCode.PRECONDITION: (PreconditionFailed,),
}


def exit_of(error: BaseException) -> ExitCode:
    return next((code for code, types in _BY_ERROR.items() if isinstance(error, types)), ExitCode.FAILED)
