"""The whole benchmark, tiny and without peers: every part measures, and table and plot are written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from loadtests.bench.peer_comparison import PARTS
from loadtests.bench.report import ReportPart

ROOT = Path(__file__).parents[3]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadtests.bench.peer_comparison", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
@pytest.mark.process
def test_every_benchmark_part_measures_tidegate(tmp_path: Path) -> None:
    ran = bench(
        *("--systems", "tidegate", "--workers", "1,2", "--rounds", "1", "--scale", "0.02"),
        *("--cell-s", "0.3", "--prefixes", "8", "--soak", "200", "--out", str(tmp_path)),
    )
    assert ran.returncode == 0, ran.stderr
    for name in PARTS:
        part = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=ReportPart)
        assert part.results
    assert ran.stdout == (tmp_path / "table.md").read_text()
    assert ran.stdout.count("### ") == len(PARTS)
    assert (tmp_path / "cost.svg").read_text().startswith("<svg")


@pytest.mark.process
def test_unknown_benchmark_parts_are_refused() -> None:
    ran = bench("--parts", "speed")
    assert ran.returncode == 2
    assert "no such parts: speed" in ran.stderr
