"""The shipped documents keep their SLO at the loads for which docs/capacity.md says so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from policy.scaling.policies.registry import choose, make
from policy.types import EngineKind
from sim.results.run_summary import summarise
from sim.simulator.run import simulate
from sim.workload.transforms import slice_trace
from sim.workload.workload_spec import arrivals_of
from tidegate.deployment_file import load

ROOT = Path(__file__).parents[3]
DEPLOYMENTS = ROOT / "deployments"
ROW = re.compile(
    r"^\| \[(?P<document>[\w-]+\.yaml)\]\(\S+\) \| (?P<trace>[\w-]+\.yaml) \| (?P<rate>[\d.]+) "
    r"\| (?P<requests>[\d,]+) \| (?P<attainment>[\d.]+) % \|.*\| (?P<kept>yes|no|no SLO) \|$",
    re.MULTILINE,
)
LASTS_S = 900.0
# Longer runs are left out.
MOST_REQUESTS = 1000


def rows() -> dict[str, re.Match[str]]:
    """By document the highest load of the table that it carries."""
    found = {}
    for row in ROW.finditer((ROOT / "docs" / "capacity.md").read_text()):
        if row["kept"] != "no" and int(row["requests"].replace(",", "")) <= MOST_REQUESTS:
            found[row["document"]] = row
    return found


def test_the_table_has_every_document_that_can_be_simulated() -> None:
    simulated = {
        path.name
        for path in DEPLOYMENTS.glob("*.yaml")
        if any(spec.engine is not EngineKind.EXTERNAL for spec in load(path, ray=False).deployment.models)
    }
    assert set(rows()) == simulated


@pytest.mark.slow
@pytest.mark.parametrize("row", rows().values(), ids=lambda row: row["document"])
def test_a_shipped_document_keeps_its_slo(row: re.Match[str]) -> None:
    deployment = load(DEPLOYMENTS / row["document"], ray=False).deployment
    (spec,) = deployment.models
    trace = slice_trace(
        arrivals_of(DEPLOYMENTS / "workloads" / row["trace"], 0, float(row["rate"])), 0.0, LASTS_S
    )
    record = simulate(deployment, {spec.name: make(choose("policy", spec.control.policy))}, trace)
    (requests,) = record.requests.values()
    assert len(requests) == int(row["requests"].replace(",", ""))
    assert np.mean(requests.met) == pytest.approx(float(row["attainment"]) / 100, abs=0.01)
    seen, slo = summarise(record), spec.control.slo
    for latency_s, target_s in ((seen.ttft_p95_s, slo.ttft_p95_s), (seen.itl_p95_s, slo.itl_p95_s)):
        assert latency_s is not None and (target_s is None or latency_s <= target_s)
