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


class Exit(IntEnum):
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
    Exit.OK: "ok",
    Exit.FAILED: "failed",
    Exit.USAGE: "usage error",
    Exit.INVALID: "invalid deployment file, workload or trace",
    Exit.NOT_RUNNING: "nothing is running, or it does not answer",
    Exit.REFUSED: "refused: replica count, mode switch, adapter, key, or a change that needs down and up",
    Exit.PRECONDITION: "precondition not met: port, memory, another Ray cluster, or external servers",
    Exit.INACCURATE: "calibration written, but its error is high",
    Exit.ROLLED_BACK: "applied and rolled back: the new revision did not start (apply --wait)",
    Exit.INTERRUPTED: "interrupted",
}

_BY_ERROR: dict[Exit, tuple[type[Exception], ...]] = {
    Exit.INVALID: (ConfigError, TraceError),
    Exit.NOT_RUNNING: (Unreachable,),
    Exit.REFUSED: (
        *(TargetError, SwitchRefused, AdapterRefused, AdapterUnknown),
        *(AccessRefused, AccessUnknown),
    ),
    Exit.PRECONDITION: (PreconditionFailed,),
}


def exit_of(error: BaseException) -> Exit:
    return next((code for code, types in _BY_ERROR.items() if isinstance(error, types)), Exit.FAILED)
