"""Every built-in policy has a series of valid settings, from most to least capacity."""

from __future__ import annotations

from typing import Any

import pytest

from policy.scaling.policies.predictive import Predictive
from policy.scaling.policies.registry import NAMES, choose
from sim.benchmarks.policies.sizing import ReplicaAtCapacity, ladder

FULL = ReplicaAtCapacity(at_once=20.0, kv_used=0.4, least=4, most=16)


def settings(name: str, full: ReplicaAtCapacity = FULL) -> list[Any]:
    chosen = [choose("policy", choice) for choice in ladder(name, full)]
    assert {each.name for each in chosen} == {name}
    return [each.policy for each in chosen]


@pytest.mark.parametrize("name", NAMES)
def test_all_settings_of_a_policy_differ(name: str) -> None:
    found = settings(name)
    assert len(found) == 7
    assert all(one != other for i, one in enumerate(found) for other in found[i + 1 :])


def test_static_counts_decrease_from_the_maximum() -> None:
    assert [each.replicas for each in settings("static")] == [16, 14, 12, 10, 8, 6, 4]
    assert [
        each.replicas
        for each in settings("static", ReplicaAtCapacity(at_once=1.0, kv_used=0.1, least=2, most=4))
    ] == [4, 3, 2]


def test_targets_range_around_the_load_of_a_full_replica() -> None:
    targets = [each.target for each in settings("target_tracking")]
    assert targets == sorted(targets)
    assert targets[0] == pytest.approx(10.0)
    assert 20.0 in targets
    assert [each.concurrency * each.utilisation for each in settings("panic_window")] == targets
    full = [each.kv * each.scale_up for each in settings("token_saturation")]
    assert full == sorted(full)
    assert 0.4 in [pytest.approx(each) for each in full]


def test_no_setting_targets_more_than_the_whole_kv_cache() -> None:
    crowded = ReplicaAtCapacity(at_once=20.0, kv_used=0.95, least=4, most=16)
    taken = [each.kv for each in settings("token_saturation", crowded)]
    assert taken[-1] == 1.0
    assert len(set(taken)) == len(taken) < 7


def test_predictive_settings_include_the_default_and_decrease_in_capacity() -> None:
    found = settings("predictive")
    assert Predictive() in found
    care = [(each.quantile, each.margin, -each.down) for each in found]
    assert care == sorted(care, reverse=True)
    for part in zip(*care, strict=True):
        assert list(part) == sorted(part, reverse=True)
