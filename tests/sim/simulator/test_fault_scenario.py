"""Scenario files: the values that are read, and errors with the key."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from policy.errors import ConfigError
from sim.simulator.fault_scenario import CrashFault, SlowdownFault, scenario_of


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.yaml"
    path.write_text(text)
    return path


def test_every_key_of_a_scenario_is_read(tmp_path: Path) -> None:
    text = """
cold_s: 120
cached_s: 40.5
spread: 0.1
crashes: [{at: 600}]
slow: [{at: 10, until: 20, factor: 2, model: m}]
"""
    found = scenario_of(written(tmp_path, text), ["m"])
    assert (found.cold_s, found.cached_s, found.sleeping_s, found.spread) == (120.0, 40.5, None, 0.1)
    assert found.crashes == (CrashFault(at=600.0),)
    assert found.slow == (SlowdownFault(at=10.0, until=20.0, factor=2.0, model="m"),)


def test_the_scenario_of_the_docs_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text()
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert scenario_of(written(tmp_path, text), []).crashes == (CrashFault(at=900.0),)


@pytest.mark.parametrize("text", [".nan", ".inf", "-.inf"])
def test_a_start_time_that_is_not_finite_is_refused(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, f"cold_s: {text}")
    with pytest.raises(ConfigError) as caught:
        scenario_of(path, ["m"])
    value = math.nan if text == ".nan" else float(text.replace(".", ""))
    assert str(caught.value) == f"{path}: cold_s: got {value!r}, expected a finite number"


@pytest.mark.parametrize(
    ("text", "place", "value", "expected"),
    [
        ("cold: 3", "cold", 3, "did you mean 'cold_s'?"),
        ("cold_s: soon", "cold_s", "soon", "float"),
        ("crashes: [{at: 1}, {at: -1}]", "crashes[1].at", -1, ">= 0"),
        ("crashes: [{at: 1, model: other}]", "crashes[0].model", "other", "one of: m"),
        ("slow: [{at: 9, until: 9, factor: 2}]", "slow[0].until", 9.0, "after 9"),
        ("slow: [{at: 9, until: 10}]", "slow[0].factor", None, "required"),
    ],
)
def test_an_error_names_the_key(tmp_path: Path, text: str, place: str, value: object, expected: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        scenario_of(path, ["m"])
    assert caught.value.path == f"{path}: {place}" and caught.value.value == value
    assert expected in caught.value.expected
