"""``bench adapters``: a table, a plot, JSON of one shape, and errors that name the option."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tidegate.cli import group

SMALL = ("--adapters", "30", "--replicas", "2", "--slots", "4", "--requests", "120", "--rate", "50")


def run(*words: str) -> Result:
    return CliRunner().invoke(group, ["bench", "adapters", *words])


def test_json_has_exactly_what_scripts_read() -> None:
    result = run(*SMALL, "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert list(said) == ["policies"]
    assert list(said["policies"]) == ["placement", "least_loaded", "serve_multiplex"]
    for each in said["policies"].values():
        assert list(each) == ["loads", "ttft_p95_s", "load_max_over_mean", "moves_per_min"]
        assert all(isinstance(value, int | float) for value in each.values())
    assert "placement: 120 requests" in result.stderr


def test_a_table_and_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "adapters.svg"
    result = run(*SMALL, "--plot", str(plot))
    assert result.exit_code == 0 and str(plot) in result.stdout.replace("\n", "")
    for words in (
        "30 adapters, Zipf exponent 1, 2 replicas x 4 slots, 50 requests/s",
        "serve_multiplex",
        "TTFT p95",
    ):
        assert words in result.stdout
    assert "<svg" in plot.read_text() and "serve multiplex" in plot.read_text()


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--adapters", "0", "1<=x<=100000"),
        ("--replicas", "-1", "1<=x<=256"),
        ("--slots", "many", "not a valid integer"),
        ("--exponent", "11", "0<=x<=10"),
        ("--rate", "nan", "0.001<=x<=100000"),
        ("--rate", "0", "0.001<=x<=100000"),
        ("--together", "0.5", "1<=x<=100"),
        ("--requests", "1000001", "1<=x<=1000000"),
        ("--plot", "/nowhere/a.svg", "a folder that exists"),
    ],
)
def test_usage_errors_name_option_value_and_range(option: str, value: str, expected: str) -> None:
    result = run(option, value)
    assert result.exit_code == 2
    for words in (option, value, expected):
        assert words in result.stderr
