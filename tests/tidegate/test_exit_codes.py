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
from tidegate.exit_codes import Exit, exit_of
from tidegate.supervisor.control_socket import Line, Request, SupervisorClient, serve


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("models", None, "a list"), Exit.INVALID),
        (TraceError("mine.csv", 7, "-1", "at least 0"), Exit.INVALID),
        (Unreachable("x"), Exit.NOT_RUNNING),
        (TargetError("x"), Exit.REFUSED),
        (SwitchRefused("x"), Exit.REFUSED),
        (PreconditionFailed("x"), Exit.PRECONDITION),
        (EngineFailed("it died"), Exit.FAILED),
        (OSError("no space"), Exit.FAILED),
    ],
)
def test_each_error_class_has_its_exit_code(error: Exception, code: Exit) -> None:
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
    async def refuse(_: Request) -> AsyncIterator[Line]:
        raise error
        yield

    state = StateDir(tmp_path).ensure()
    async with await serve(state.socket_path, refuse):
        with pytest.raises(TidegateError) as caught:
            await asyncio.to_thread(SupervisorClient(state).status)
    assert (exit_of(caught.value), str(caught.value)) == (exit_of(error), str(error))
