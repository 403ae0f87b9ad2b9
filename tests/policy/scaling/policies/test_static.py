"""The static policy keeps its count, within the bounds of the mode."""

from __future__ import annotations

import pytest

from policy.scaling.policies.static import Static
from tests.policy.scaling.views import demand, view


@pytest.mark.parametrize(
    ("replicas", "count", "proposed", "reason"),
    [
        (None, 3, 3, "3 as now"),
        (None, 0, 1, "0 as now"),
        (None, 9, 5, "9 as now"),
        (4, 1, 4, "4 configured"),
        (7, 1, 5, "7 configured"),
        (0, 3, 1, "0 configured"),
    ],
)
def test_the_count_stays_within_bounds(replicas: int | None, count: int, proposed: int, reason: str) -> None:
    policy = Static(replicas=replicas)
    for seen in (None, demand(0.0), demand(100.0, queued=50)):
        proposal = policy.decide(view(seen, count=count, least=1, most=5), None)
        assert proposal.count == proposed
        assert reason in proposal.reason
