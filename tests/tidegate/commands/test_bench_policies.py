"""``bench policies``: what it refuses, and that the option is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tidegate.cli import group


def run(*words: str) -> Result:
    return CliRunner().invoke(group, ["bench", "policies", *words])


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--leads", "30,x", "expected seconds above 0 and up to 3600"),
        ("--leads", "0", "expected seconds above 0 and up to 3600"),
        ("--policies", "static,none", "'none': expected some of static"),
        ("--half", "third", "tune"),
        ("--seeds", "0", "1<=x<=100"),
        ("--plot", "/nowhere/at/all.svg", "expected a file in a folder that exists"),
    ],
)
def test_usage_errors(option: str, value: str, expected: str) -> None:
    result = run(option, value)
    assert result.exit_code == 2
    assert option in result.stderr
    assert expected in result.stderr.replace("\n", " ")


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("not a trace")
    result = run("--traces", str(tmp_path))
    assert result.exit_code != 0
    assert str(tmp_path) in str(result.exception) + result.output
