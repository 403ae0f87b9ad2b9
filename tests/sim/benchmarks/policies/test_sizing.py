"""Every built-in policy has a ladder of settings that a document may choose, from careful to thrifty."""

from __future__ import annotations

from typing import Any

import pytest

from policy.scaling.policies.predictive import Predictive
from policy.scaling.policies.registry import NAMES, choose
from sim.benchmarks.policies.sizing import Full, ladder

FULL = Full(at_once=20.0, kv_used=0.4, least=4, most=16)


def rungs(name: str, full: Full = FULL) -> list[Any]:
    chosen = [choose("policy", choice) for choice in ladder(name, full)]
    assert {each.name for each in chosen} == {name}
    return [each.policy for each in chosen]


@pytest.mark.parametrize("name", NAMES)
def test_all_settings_differ(name: str) -> None:
    found = rungs(name)
    assert len(found) == 7
    assert all(one != other for i, one in enumerate(found) for other in found[i + 1 :])


def test_counts_go_down_from_the_most() -> None:
    assert [each.replicas for each in rungs("static")] == [16, 14, 12, 10, 8, 6, 4]
    assert [each.replicas for each in rungs("static", Full(at_once=1.0, kv_used=0.1, least=2, most=4))] == [
        4,
        3,
        2,
    ]


def test_targets_are_swept_around_the_state_of_a_full_replica() -> None:
    targets = [each.target for each in rungs("target_tracking")]
    assert targets == sorted(targets)
    assert targets[0] == pytest.approx(10.0)
    assert 20.0 in targets
    assert [each.concurrency * each.utilisation for each in rungs("panic_window")] == targets
    full = [each.kv * each.scale_up for each in rungs("token_saturation")]
    assert full == sorted(full)
    assert 0.4 in [pytest.approx(each) for each in full]


def test_no_cache_takes_more_than_it_holds() -> None:
    crowded = Full(at_once=20.0, kv_used=0.95, least=4, most=16)
    taken = [each.kv for each in rungs("token_saturation", crowded)]
    assert taken[-1] == 1.0
    assert len(set(taken)) == len(taken) < 7


def test_predictive_settings_go_from_careful_to_thrifty_with_the_default() -> None:
    found = rungs("predictive")
    assert Predictive() in found
    care = [(each.quantile, each.margin, -each.down) for each in found]
    assert care == sorted(care, reverse=True)
    for part in zip(*care, strict=True):
        assert list(part) == sorted(part, reverse=True)
