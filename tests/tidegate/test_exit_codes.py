"""Which error ends in which exit code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from policy.errors import (
    ConfigError,
    EngineFailed,
    PreconditionFailed,
    SwitchRefused,
    TargetError,
    TidegateError,
    TraceError,
    Unreachable,
)
from store.state_dir import StateDir
from tidegate.exit_codes import ExitCode, exit_of
from tidegate.supervisor.control_socket import (
    SupervisorClient,
    SupervisorRequest,
    SupervisorResponseLine,
    serve,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("models", None, "a list"), ExitCode.INVALID),
        (TraceError("mine.csv", 7, "-1", "at least 0"), ExitCode.INVALID),
        (Unreachable("x"), ExitCode.NOT_RUNNING),
        (TargetError("x"), ExitCode.REFUSED),
        (SwitchRefused("x"), ExitCode.REFUSED),
        (PreconditionFailed("x"), ExitCode.PRECONDITION),
        (EngineFailed("it died"), ExitCode.FAILED),
        (OSError("no space"), ExitCode.FAILED),
    ],
)
def test_each_error_class_has_its_exit_code(error: Exception, code: ExitCode) -> None:
    assert exit_of(error) is code


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a.b", [1], "two"),
        TargetError("t"),
        SwitchRefused("s"),
        Unreachable("u"),
        EngineFailed("e"),
    ],
)
async def test_errors_are_transferred_over_the_socket(error: TidegateError, tmp_path: Path) -> None:
    async def refuse(_: SupervisorRequest) -> AsyncIterator[SupervisorResponseLine]:
        raise error
        yield

    state = StateDir(tmp_path).ensure()
    async with await serve(state.socket_path, refuse):
        with pytest.raises(TidegateError) as caught:
            await asyncio.to_thread(SupervisorClient(state).status)
    assert (exit_of(caught.value), str(caught.value)) == (exit_of(error), str(error))
