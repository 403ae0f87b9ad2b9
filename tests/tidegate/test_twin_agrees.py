"""The simulated engine over HTTP and the twin: the same arrivals, the same latencies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from policy.scaling.choice import choose, make
from tests.ports import free_ports
from tests.tidegate.conftest import Site
from tidegate.calibrating.checking import check, recorded
from tidegate.children import ROOT
from tidegate.document import load

pytestmark = pytest.mark.slow

# Prompts of half a second, so that what the way to the engine takes is little beside it.
WORKLOAD = """
duration_s: 60
mix:
  - generate:
      arrivals: {rate: 0.7}
      input_tokens: {p50: 1500, p99: 3500}
      output_tokens: {p50: 40, p99: 150}
"""


@pytest.fixture
def sim(site: Site) -> Iterator[Site]:
    """The shipped document on ports of this test's own, with one replica: of two it would be chance which."""
    document = yaml.safe_load((ROOT / "deployments" / "sim.yaml").read_text())
    document["gateway"] |= {"port": site.port, "admin_port": site.admin_port, "workers": 1}
    document["cluster"] |= {"controller": f"127.0.0.1:{free_ports(1)[0]}"}
    document["models"][0]["modes"]["multi-replica"]["replicas"] = 1
    site.file.write_text(json.dumps(document))
    code, _, err = site.tidegate("up", str(site.file), "--no-ray", "--timeout-s", "150")
    assert (code, err) == (0, "")
    yield site


def test_what_is_measured_over_http_is_what_the_twin_says(sim: Site, tmp_path: Path) -> None:
    workload, record = tmp_path / "workload.yaml", tmp_path / "record.jsonl"
    workload.write_text(WORKLOAD)
    url = f"http://127.0.0.1:{sim.port}"
    code, _, err = sim.tidegate(
        "replay", str(workload), "--url", url, "--model", "sim", "--seed", "3", "--record", str(record)
    )
    assert code == 0, err
    deployment = load(sim.file, ray=False).deployment
    policies = {"sim": make(choose("policy", "static"))}
    found = check(deployment, policies, recorded(record), 0.0, lambda at: None).compared
    assert found.live == found.twin > 30
    quantiles = found.quantiles
    compared = [quantiles[measure]["p50"] for measure in ("ttft", "itl", "e2e")]
    # Of forty requests' gaps the ninetieth percentile is one of two neighbours, as it happens.
    compared += [quantiles[measure]["p90"] for measure in ("ttft", "e2e")]
    assert all(abs(pair.error) <= 0.05 for pair in compared), quantiles
