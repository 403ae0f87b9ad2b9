"""When an aim is reached, when it failed, and when it cannot be had without a gap."""

from __future__ import annotations

import pytest

from policy.scaling.rollout import (
    MAX_FAILURES,
    Footprint,
    Goal,
    Layer,
    LayerKey,
    needs_gap,
    reached,
    verdict,
)

LARGE, SMALL = LayerKey("m", "large", 1), LayerKey("m", "small", 1)
GPUS = {LARGE: Footprint(gpus=8), SMALL: Footprint(gpus=1)}
CPUS = {LARGE: Footprint(cpus=2), SMALL: Footprint(cpus=1)}


@pytest.mark.parametrize(("ready", "expected"), [(1, False), (2, True), (3, True)])
def test_an_aim_is_reached_by_ready_replicas(ready: int, expected: bool) -> None:
    assert reached(2, Layer(wanted=2, starting=2, ready=ready)) is expected


@pytest.mark.parametrize(
    ("layer", "elapsed_s", "said"),
    [
        (Layer(wanted=1, starting=1), 1.0, ""),
        (Layer(wanted=1, starting=1, failures=MAX_FAILURES - 1), 1.0, ""),
        (Layer(wanted=1, failures=MAX_FAILURES), 1.0, "3 starts in a row failed"),
        (Layer(wanted=1, broken=True), 1.0, "the cluster gave up starting it"),
        (Layer(wanted=1, starting=1), 61.0, "not ready after 61 s"),
        (Layer(wanted=2, ready=1, failures=MAX_FAILURES, broken=True), 59.0, ""),
        (Layer(wanted=2, ready=1), 61.0, "not ready after 61 s"),
    ],
)
def test_a_verdict_says_why(layer: Layer, elapsed_s: float, said: str) -> None:
    assert verdict(layer, elapsed_s, start_timeout_s=60.0) == said


@pytest.mark.parametrize(
    ("gpus", "min_healthy", "gap"),
    [(8, 1, True), (15, 1, False), (8, 0, False), (16, 1, False), (None, 1, False)],
)
def test_a_large_replica_over_all_gpus_needs_a_gap(gpus: int | None, min_healthy: int, gap: bool) -> None:
    goal = Goal(key=LARGE, count=1, min_healthy=min_healthy)
    layers = {SMALL: Layer(wanted=8, ready=8)}
    assert needs_gap(goal, layers, GPUS, gpus, None) is gap


def test_cpus_need_no_gap() -> None:
    layers = {SMALL: Layer(wanted=2, ready=2)}
    assert not needs_gap(Goal(key=LARGE, count=1), layers, CPUS, None, 2)


def test_what_already_fails_to_serve_needs_no_gap_to_be_replaced() -> None:
    new = LayerKey("m", "large", 2)
    layers = {LARGE: Layer(wanted=1, starting=1, failures=2)}
    footprints = GPUS | {new: Footprint(gpus=8)}
    assert not needs_gap(Goal(key=new, count=1), layers, footprints, 8, None)
    assert needs_gap(Goal(key=new, count=1), {LARGE: Layer(wanted=1, ready=1)}, footprints, 8, None)
    assert needs_gap(Goal(key=new, count=1), {LARGE: Layer(wanted=1)}, footprints, 8, None)


def test_a_switch_in_progress_is_judged_from_where_it_is() -> None:
    layers = {SMALL: Layer(wanted=1, ready=1), LARGE: Layer(wanted=1, ready=1)}
    assert not needs_gap(Goal(key=LARGE, count=1), layers, GPUS, 9, None)
