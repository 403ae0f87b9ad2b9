"""``bench modes``: a table, a plot, JSON of one shape, and errors that name what is wrong."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from policy.document.parse import parse
from sim.workload.file import read_workload
from tidegate.cli import group
from tidegate.exit_codes import Exit, exit_of
from tidegate.supervisor.children import ROOT

DOCUMENT = """
models:
  - name: m
    engine: sim
    sim: {profile: h100-8b, wake_s: 1}
    shapes:
      large: {gpus: 2, tensor_parallel: 2}
      small: {gpus: 1}
    modes:
      single-large: {shape: large}
      multi-replica: {shape: small, replicas: {min: 1, max: 2}}
    control: {slo: {ttft_p95_s: 2.0}}
budget: {gpus: 2}
"""
WORKLOAD = """
duration_s: 20
mix:
  - generate: {arrivals: {rate: 1.5}, input_tokens: 200, output_tokens: 20}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "deployment.yaml").write_text(DOCUMENT)
    (tmp_path / "load.yaml").write_text(WORKLOAD)
    return tmp_path


def run(site: Path, *words: str, trace: str = "load.yaml") -> Result:
    given = ("bench", "modes", str(site / "deployment.yaml"), "--trace", str(site / trace), *words)
    return CliRunner().invoke(group, list(given))


def test_json_has_exactly_what_scripts_read(site: Path) -> None:
    result = run(site, "--seeds", "2", "--seed", "5", "--json")
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert list(said) == ["trace", "seeds", "gains", "runs"]
    assert said["trace"] == "load.yaml" and said["seeds"] == [5, 6]
    assert said["gains"] == pytest.approx([0.0, 0.0], abs=0.05), "nothing is to be gained on so small a load"
    assert list(said["runs"]) == ["by_load", "single-large", "multi-replica"]
    for each in said["runs"].values():
        assert list(each) == ["goodput_rps", "attainment", "gpu_hours", "switches", "switches_per_h",
                              "ttft_p95_s", "itl_p95_s", "failed"]  # fmt: skip
        assert all(isinstance(value, int | float) for value in each.values())
    assert result.stderr.count(" simulated") == 3


def test_a_table_a_verdict_and_a_plot(site: Path) -> None:
    plot = site / "modes.svg"
    result = run(site, "--seeds", "1", "--plot", str(plot))
    assert result.exit_code == 0 and str(plot) in result.stdout.replace("\n", "")
    for words in (
        "by load",
        "multi-replica",
        "goodput/s",
        "switches/h",
        "over the best single mode",
        "1.00x its GPU-hours",
    ):
        assert words in result.stdout
    assert "<svg" in plot.read_text() and "load.yaml on deployment.yaml" in plot.read_text()


def test_errors_say_what_was_expected(site: Path) -> None:
    result = run(site, "--plot", "/nowhere/a.svg")
    assert result.exit_code == 2 and "a folder that exists" in result.stderr
    (site / "none.yaml").write_text("mix: [{trace: {path: t.csv, from_s: 5}}]")
    (site / "t.csv").write_text("request_id,timestamp,input_tokens,output_tokens\n1,0,1,1\n")
    error = run(site, trace="none.yaml").exception
    assert error is not None and exit_of(error) is Exit.INVALID and "at least one request" in str(error)
    (site / "deployment.yaml").write_text(DOCUMENT.replace("      single-large: {shape: large}\n", ""))
    error = run(site).exception
    assert error is not None and exit_of(error) is Exit.INVALID and "two modes at least" in str(error)


def test_the_shipped_crossover_is_a_bed_and_a_load_that_crosses_over() -> None:
    (spec,) = parse(yaml.safe_load((ROOT / "deployments" / "crossover.yaml").read_text())).models
    assert list(spec.modes) == ["single-large", "multi-replica"] and spec.sim.wake_s
    workload = read_workload(ROOT / "deployments" / "workloads" / "crossover.yaml")
    documents, chat = (source.generate for source in workload.spec.mix)
    assert documents is not None and chat is not None
    # What comes by the minute, in the order in which one takes over from the other.
    stretches = [
        "documents" if documents.arrivals.at(at) else "chat"
        for at in range(15, 10_800, 60)
        if bool(documents.arrivals.at(at)) != bool(chat.arrivals.at(at))
    ]
    assert len(stretches) == 180, "never both, and never neither"
    changes = [one for one, other in pairwise(stretches) if one != other]
    assert changes == ["documents", "chat", "documents", "chat"]
