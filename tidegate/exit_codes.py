"""What an exit code means, and which error ends in which."""

from __future__ import annotations

from enum import IntEnum

from policy.errors import (
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
    """The exit codes of every command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INVALID = 3
    NOT_RUNNING = 4
    REFUSED = 5
    PRECONDITION = 6
    INACCURATE = 7
    INTERRUPTED = 130


MEANINGS = {
    Exit.OK: "ok",
    Exit.FAILED: "failed",
    Exit.USAGE: "usage error",
    Exit.INVALID: "invalid deployment document, workload or trace",
    Exit.NOT_RUNNING: "nothing is running, or it does not answer",
    Exit.REFUSED: "refused: target, switch, adapter, or a change that needs down and up",
    Exit.PRECONDITION: "precondition: port taken, too little memory, foreign Ray",
    Exit.INACCURATE: "calibrated, but further off than is good; the file is written",
    Exit.INTERRUPTED: "interrupted",
}

_BY_ERROR: tuple[tuple[type[Exception], Exit], ...] = (
    (ConfigError, Exit.INVALID),
    (TraceError, Exit.INVALID),
    (Unreachable, Exit.NOT_RUNNING),
    (TargetError, Exit.REFUSED),
    (SwitchRefused, Exit.REFUSED),
    (AdapterRefused, Exit.REFUSED),
    (AdapterUnknown, Exit.REFUSED),
    (PreconditionFailed, Exit.PRECONDITION),
)


def exit_of(error: BaseException) -> Exit:
    """The exit code that says what kind of failure ``error`` is."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), Exit.FAILED)
