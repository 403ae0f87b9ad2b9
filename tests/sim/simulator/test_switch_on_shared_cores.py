"""On two cores a start takes half of what serves: a burst in the first minute is no reason to switch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from policy.scaling.policies.registry import choose, make
from sim.arrivals import Arrival
from sim.benchmarks.mode_switching import fixed_mode
from sim.results.run_summary import PolicyEntry
from sim.simulator.run import simulate
from sim.simulator.run_record import RunRecord
from tidegate.deployment_file import load

DOCUMENT = Path(__file__).parents[3] / "deployments" / "smollm2-cpu-modes.yaml"
FIVE_MINUTES_S = 300.0


def burst() -> Iterator[Arrival]:
    """Two chats a second from the 10th second to the 55th, more than either mode serves; else one in two."""
    at = 0.0
    while at < FIVE_MINUTES_S:
        yield Arrival(at, 60, 32)
        at += 1 / 2 if 10 <= at < 55 else 2.0


def played() -> dict[str, RunRecord]:
    document = load(DOCUMENT).deployment
    (spec,) = document.models
    by_load = PolicyEntry("by load", document, {spec.name: make(choose("", "predictive"))})
    return {
        each.name: simulate(each.deployment, each.policies, burst())
        for each in (by_load, *fixed_mode(document))
    }


@pytest.mark.slow
def test_switching_loses_to_neither_mode_in_five_minutes_that_begin_with_a_burst() -> None:
    met = {
        name: int(np.count_nonzero(requests.met))
        for name, record in played().items()
        for requests in record.requests.values()
    }
    assert met["by load"] >= max(met["single-large"], met["multi-replica"]) > 0
