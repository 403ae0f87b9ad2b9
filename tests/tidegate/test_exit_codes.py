"""Which error ends in which exit code."""

from __future__ import annotations

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
from tidegate.exit_codes import MEANINGS, Exit, exit_of
from tidegate.supervisor.socket import problem_of


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
def test_an_error_says_what_kind_of_failure_it_is(error: Exception, code: Exit) -> None:
    assert exit_of(error) is code


def test_every_code_means_something() -> None:
    assert set(MEANINGS) == set(Exit)


def test_a_bad_line_is_named() -> None:
    error = TraceError("mine.csv", 7, "-1", "at least 0")
    assert isinstance(error, TidegateError) and str(error) == "mine.csv:7: got '-1', expected at least 0"


@pytest.mark.parametrize("error", [ConfigError("a.b", [1], "two"), TargetError("t"), SwitchRefused("s")])
def test_an_error_crosses_the_socket_as_itself(error: ConfigError | TargetError | SwitchRefused) -> None:
    other = problem_of(error).error()
    assert (type(other), str(other)) == (type(error), str(error))
