"""Laws and timelines of the plan: what a switch may hold, must keep and always reaches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.scaling.rollout import CPU_OVERCOMMIT, Footprint, Goal, Layer, LayerKey, fits, needs_gap, step
from tests.policy.cluster_play import Cluster

LARGE, SMALL = LayerKey("m", "large", 1), LayerKey("m", "small", 1)
NEW_LARGE, NEW_SMALL = LayerKey("m", "large", 2), LayerKey("m", "small", 2)
KEYS = (LARGE, SMALL, NEW_LARGE, NEW_SMALL)
ENOUGH_TICKS = 400


def gpu_shapes(large: int, small: int) -> dict[LayerKey, Footprint]:
    return {key: Footprint(gpus=large if key.shape == "large" else small) for key in KEYS}


def cpu_shapes(large: int, small: int) -> dict[LayerKey, Footprint]:
    return {key: Footprint(cpus=large if key.shape == "large" else small) for key in KEYS}


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Something that runs within its budget, and a goal that fits the budget by itself."""
    shapes = draw(st.sampled_from([gpu_shapes, cpu_shapes]))
    large, small = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    footprints = shapes(large, small)
    budget = draw(st.integers(max(large, small), 8))
    each = {key: max(shape.gpus, shape.cpus) for key, shape in footprints.items()}
    left, counts = budget, {}
    for key, name in zip(KEYS, ("large", "small", "large2", "small2"), strict=True):
        counts[name] = draw(st.integers(0, left // each[key]))
        left -= counts[name] * each[key]
    key = draw(st.sampled_from(KEYS))
    count = draw(st.integers(0, budget // each[key]))
    goal = Goal(
        key=key,
        count=count,
        min_healthy=min(draw(st.integers(0, 3)), count),
        gap=draw(st.booleans()),
    )
    return Cluster(
        goal,
        footprints,
        gpus=budget if shapes is gpu_shapes else None,
        cpus=budget if shapes is cpu_shapes else None,
        random=draw(st.randoms(use_true_random=False)),
        fail=draw(st.sampled_from([0.0, 0.0, 0.5])),
    ).run(**counts)


@given(clusters())
def test_a_switch_keeps_its_promises_at_every_tick(cluster: Cluster) -> None:
    floor = 0 if cluster.goal.gap else min(cluster.goal.min_healthy, cluster.ready())
    starves = needs_gap(cluster.goal, cluster.layers(), cluster.footprints, cluster.gpus, cluster.cpus)
    for _ in range(ENOUGH_TICKS):
        cluster.tick()
        assert cluster.gpus is None or cluster.used("gpus") <= cluster.gpus
        assert cluster.cpus is None or cluster.used("cpus") <= CPU_OVERCOMMIT * cluster.cpus
        assert cluster.ready() >= floor
        if cluster.reached():
            break
    if cluster.goal.gap or not starves:
        assert cluster.reached()
    if cluster.reached():
        assert cluster.cpus is None or cluster.used("cpus") <= cluster.cpus


@pytest.mark.slow
@given(clusters())
def test_a_goal_that_was_reached_stays(cluster: Cluster) -> None:
    for _ in range(ENOUGH_TICKS):
        cluster.tick()
    seen = len(cluster.timeline)
    before = cluster.reached()
    for _ in range(5):
        cluster.tick()
    assert len(cluster.timeline) == seen
    assert cluster.reached() == before


@given(clusters())
def test_a_step_only_depends_on_what_is_observed(cluster: Cluster) -> None:
    """So a controller that was restarted in the middle of a switch goes on with it."""
    for _ in range(4):
        layers = cluster.layers()
        first = step(cluster.goal, layers, cluster.footprints, cluster.gpus, cluster.cpus)
        assert step(cluster.goal, layers, cluster.footprints, cluster.gpus, cluster.cpus) == first
        assert set(first) == {*layers, cluster.goal.key}
        cluster.tick()


def timeline(cluster: Cluster) -> list[dict[str, int]]:
    while not cluster.reached():
        cluster.tick()
        assert len(cluster.timeline) < ENOUGH_TICKS
    return cluster.timeline


def test_eight_small_to_one_large_stops_all_when_the_gap_is_allowed() -> None:
    goal = Goal(key=LARGE, count=1, gap=True)
    cluster = Cluster(goal, gpu_shapes(8, 1), gpus=8).run(small=8)
    assert timeline(cluster) == [{"small": 0, "large": 0}, {"small": 0, "large": 1}]


def test_eight_small_to_one_large_does_nothing_without_the_gap() -> None:
    cluster = Cluster(Goal(key=LARGE, count=1), gpu_shapes(8, 1), gpus=8).run(small=8)
    for _ in range(50):
        cluster.tick()
    assert cluster.timeline == [{"small": 8, "large": 0}]
    assert cluster.ready() == 8


def test_eight_small_to_two_of_four_roll_by_halves() -> None:
    cluster = Cluster(Goal(key=LARGE, count=2), gpu_shapes(4, 1), gpus=8).run(small=8)
    assert timeline(cluster) == [
        {"small": 4, "large": 0},
        {"small": 4, "large": 1},
        {"small": 0, "large": 1},
        {"small": 0, "large": 2},
    ]


def test_spare_gpus_make_before_they_break() -> None:
    cluster = Cluster(Goal(key=LARGE, count=1), gpu_shapes(8, 1), gpus=16).run(small=8)
    assert timeline(cluster) == [{"small": 8, "large": 1}, {"small": 0, "large": 1}]


def test_a_new_generation_of_the_same_shape_rolls_over_scarce_gpus() -> None:
    cluster = Cluster(Goal(key=NEW_SMALL, count=8), gpu_shapes(8, 1), gpus=8).run(small=8)
    old = [counts["small"] for counts in timeline(cluster)]
    assert [count for count in range(8, -1, -1) if count in old] == [4, 2, 1, 0]
    assert old == sorted(old, reverse=True)


def test_many_healthy_replicas_are_kept_by_giving_up_fewer_than_half() -> None:
    goal = Goal(key=NEW_SMALL, count=4, min_healthy=3)
    cluster = Cluster(goal, gpu_shapes(4, 1), gpus=4).run(small=4)
    assert timeline(cluster)[:2] == [{"small": 3, "small2": 0}, {"small": 3, "small2": 1}]


def test_of_two_old_layers_one_gives_way() -> None:
    cluster = Cluster(Goal(key=LARGE, count=1), gpu_shapes(1, 1), gpus=2).run(small=1, small2=1)
    assert sum(timeline(cluster)[0].values()) == 1


def test_cpus_are_overcommitted_for_the_length_of_the_switch() -> None:
    cluster = Cluster(Goal(key=SMALL, count=2), cpu_shapes(2, 1), cpus=2).run(large=1)
    assert timeline(cluster) == [{"large": 1, "small": 2}, {"large": 0, "small": 2}]


def test_cpus_are_not_overcommitted_by_one_layer_alone() -> None:
    layers = {SMALL: Layer(wanted=1, ready=1)}
    assert step(Goal(key=SMALL, count=4), layers, cpu_shapes(2, 1), None, 2) == {SMALL: 2}


def test_a_scale_down_waits_until_the_others_are_gone() -> None:
    goal = Goal(key=SMALL, count=2)
    busy = {SMALL: Layer(wanted=4, ready=4), LARGE: Layer(wanted=0, draining=1)}
    assert step(goal, busy, gpu_shapes(4, 1), 8, None) == {SMALL: 4, LARGE: 0}
    done = busy | {LARGE: Layer(wanted=0)}
    assert step(goal, done, gpu_shapes(4, 1), 8, None) == {SMALL: 2, LARGE: 0}


def test_a_scale_up_waits_for_the_gpus_of_its_own_draining_replica() -> None:
    draining = {SMALL: Layer(wanted=1, ready=1, draining=1)}
    assert step(Goal(key=SMALL, count=2), draining, gpu_shapes(4, 1), 2, None) == {SMALL: 1}


def test_what_serves_nobody_gives_way_although_nothing_is_healthy() -> None:
    broken = {SMALL: Layer(wanted=1, starting=1, failures=2)}
    assert step(Goal(key=NEW_SMALL, count=1), broken, gpu_shapes(4, 1), 1, None) == {SMALL: 0, NEW_SMALL: 0}


def test_what_was_not_heard_of_yet_is_not_given_up() -> None:
    unheard = {SMALL: Layer(wanted=1)}
    assert step(Goal(key=NEW_SMALL, count=1), unheard, gpu_shapes(4, 1), 1, None) == {SMALL: 1, NEW_SMALL: 0}


def test_nothing_is_given_up_where_that_makes_no_room() -> None:
    layers = {SMALL: Layer(wanted=2, ready=2)}
    goal = Goal(key=LARGE, count=1, gap=True)
    assert step(goal, layers, gpu_shapes(4, 1), 2, None) == {SMALL: 2, LARGE: 0}


def test_room_without_a_bound_is_unbounded() -> None:
    assert fits(None, 8) > 1000
    assert fits(3, 0) > 1000
    assert (fits(7, 2), fits(-4, 2)) == (3, 0)
