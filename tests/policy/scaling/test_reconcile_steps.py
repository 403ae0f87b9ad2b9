"""Rollouts: the resources of a switch, its serving replicas, and its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.deployment import ResourceBudget
from policy.scaling.budget_resources import Resources, total
from policy.scaling.reconcile_steps import (
    CPU_OVERCOMMIT,
    MAX_FAILURES,
    Layer,
    LayerKey,
    RolloutGoal,
    RolloutPlanner,
    SharedGpus,
    verdict,
)

LARGE, SMALL = LayerKey("m", "large", 1), LayerKey("m", "small", 1)
NEW_LARGE, NEW_SMALL = LayerKey("m", "large", 2), LayerKey("m", "small", 2)
KEYS = (LARGE, SMALL, NEW_LARGE, NEW_SMALL)
ENOUGH_TICKS = 400


def gpu_shapes(large: int, small: int) -> dict[LayerKey, Resources]:
    return {key: Resources(gpus=large if key.shape == "large" else small) for key in KEYS}


def shared(gpus: int) -> tuple[SharedGpus, ...]:
    """Both shapes of each generation in a group of so many GPUs."""
    generations = ({LARGE, SMALL}, {NEW_LARGE, NEW_SMALL})
    return tuple(SharedGpus(Resources(gpus=gpus), frozenset(layers)) for layers in generations)


def cpu_shapes(large: int, small: int) -> dict[LayerKey, Resources]:
    return {key: Resources(cpus=large if key.shape == "large" else small) for key in KEYS}


@dataclass
class Played:
    """A replica and the ticks until its state changes."""

    state: str
    ticks: int


@dataclass
class Cluster:
    """Layers of one model; ``timeline`` holds the counts asked for, each time they changed.

    ``fail`` is the chance that a start fails once and is tried again in place.
    """

    goal: RolloutGoal
    footprints: Mapping[LayerKey, Resources]
    gpus: int | None = None
    cpus: int | None = None
    random: Random = field(default_factory=lambda: Random(0))  # noqa: S311 - chance, not secrecy
    fail: float = 0.0
    wanted: dict[LayerKey, int] = field(default_factory=dict)
    replicas: dict[LayerKey, list[Played]] = field(default_factory=dict)
    timeline: list[dict[str, int]] = field(default_factory=list)
    groups: tuple[SharedGpus, ...] = ()

    def run(self, **counts: int) -> Cluster:
        """Let ``counts`` replicas of each shape, all of them ready, exist, and no others."""
        for key in self.footprints:
            count = counts.get(_name(key), 0)
            if count:
                self.wanted[key] = count
                self.replicas[key] = [Played("ready", 0) for _ in range(count)]
        return self

    def layers(self) -> dict[LayerKey, Layer]:
        return {
            key: Layer(
                wanted=wanted,
                starting=self._count(key, "starting"),
                ready=self._count(key, "ready"),
                draining=self._count(key, "draining"),
            )
            for key, wanted in self.wanted.items()
        }

    def rollout(self) -> RolloutPlanner:
        bounds = total(ResourceBudget(gpus=self.gpus, cpus=self.cpus))
        return RolloutPlanner(self.goal, self.layers(), self.footprints, bounds, self.groups)

    def tick(self) -> None:
        """One step of the plan, then one tick of every replica."""
        for key, count in self.rollout().step().items():
            self._ask(key, count)
        wanted = {_name(key): count for key, count in self.wanted.items()}
        if not self.timeline or self.timeline[-1] != wanted:
            self.timeline.append(wanted)
        for key, replicas in self.replicas.items():
            for replica in replicas:
                self._age(replica)
            self.replicas[key] = [replica for replica in replicas if replica.state != "gone"]

    def ready(self) -> int:
        """Ready replicas of all layers."""
        return sum(self._count(key, "ready") for key in self.replicas)

    def used(self, resource: str) -> int:
        """What all replicas hold, draining ones included; a group with any replica holds all that it has."""
        taken = {
            key: len(replicas) * getattr(self.footprints[key], resource)
            for key, replicas in self.replicas.items()
        }
        for group in self.groups:
            inside = sum(taken.pop(key, 0) for key in group.layers)
            amount = getattr(group.amount, resource)
            assert inside <= amount
            taken[min(group.layers)] = amount if inside else 0
        return sum(taken.values())

    def reached(self) -> bool:
        alone = all(not replicas for key, replicas in self.replicas.items() if key != self.goal.key)
        own = self.replicas.get(self.goal.key, [])
        return alone and len(own) == self._count(self.goal.key, "ready") == self.goal.count

    def _ask(self, key: LayerKey, count: int) -> None:
        replicas = self.replicas.setdefault(key, [])
        staying = [replica for replica in replicas if replica.state != "draining"]
        self.wanted[key] = count
        replicas += [Played("starting", self.random.randint(1, 4)) for _ in range(count - len(staying))]
        # The rollout does not choose which replicas leave.
        for replica in self.random.sample(staying, max(0, len(staying) - count)):
            replica.state, replica.ticks = "draining", self.random.randint(1, 4)

    def _age(self, replica: Played) -> None:
        if replica.state == "ready":
            return
        replica.ticks -= 1
        if replica.ticks > 0:
            return
        if replica.state == "draining":
            replica.state = "gone"
        elif self.random.random() < self.fail:
            replica.ticks = self.random.randint(1, 4)
        else:
            replica.state = "ready"

    def _count(self, key: LayerKey, state: str) -> int:
        return sum(replica.state == state for replica in self.replicas.get(key, []))


def _name(key: LayerKey) -> str:
    return key.shape if key.generation == 1 else f"{key.shape}{key.generation}"


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Layers within the budget, and a goal that fits it alone."""
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
    groups: tuple[SharedGpus, ...] = ()
    if shapes is gpu_shapes and not large % small and draw(st.booleans()):
        # Each generation on the GPUs of one large replica, one of the generations and one shape at first.
        groups, gpus = shared(large), {"large": large, "large2": large, "small": small, "small2": small}
        first = draw(st.sampled_from(sorted(counts)))
        counts = {first: min(counts[first], large // gpus[first])}
        count = min(count, large // each[key])
    goal = RolloutGoal(
        key=key, count=count, min_healthy=min(draw(st.integers(0, 3)), count), gap=draw(st.booleans())
    )
    return Cluster(
        goal,
        footprints,
        gpus=budget if shapes is gpu_shapes else None,
        cpus=budget if shapes is cpu_shapes else None,
        random=draw(st.randoms(use_true_random=False)),
        fail=draw(st.sampled_from([0.0, 0.0, 0.5])),
        groups=groups,
    ).run(**counts)


@pytest.mark.slow
@given(clusters())
def test_a_switch_keeps_budget_and_min_healthy_at_every_tick(cluster: Cluster) -> None:
    floor = 0 if cluster.goal.gap else min(cluster.goal.min_healthy, cluster.ready())
    needs_gap = cluster.rollout().needs_gap()
    for _ in range(ENOUGH_TICKS):
        cluster.tick()
        assert cluster.gpus is None or cluster.used("gpus") <= cluster.gpus
        assert cluster.cpus is None or cluster.used("cpus") <= CPU_OVERCOMMIT * cluster.cpus
        assert cluster.ready() >= floor
        if cluster.reached():
            break
    if cluster.goal.gap or not needs_gap:
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


TIMELINES = {
    "eight small ones stop for a large one where a gap is allowed": (
        RolloutGoal(key=LARGE, count=1, gap=True), gpu_shapes(8, 1), {"gpus": 8}, {"small": 8},
        [{"small": 0, "large": 0}, {"small": 0, "large": 1}],
    ),
    "eight small ones roll by halves to two of four GPUs": (
        RolloutGoal(key=LARGE, count=2), gpu_shapes(4, 1), {"gpus": 8}, {"small": 8},
        [
            {"small": 4, "large": 0},
            {"small": 4, "large": 1},
            {"small": 0, "large": 1},
            {"small": 0, "large": 2},
        ],
    ),
    "spare GPUs: make before break": (
        RolloutGoal(key=LARGE, count=1), gpu_shapes(8, 1), {"gpus": 16}, {"small": 8},
        [{"small": 8, "large": 1}, {"small": 0, "large": 1}],
    ),
    "min_healthy keeps more than half": (
        RolloutGoal(key=NEW_SMALL, count=4, min_healthy=3), gpu_shapes(4, 1), {"gpus": 4}, {"small": 4},
        [{"small": 3, "small2": 0}, {"small": 3, "small2": 1}],
    ),
    "cores are overcommitted during the switch": (
        RolloutGoal(key=SMALL, count=2), cpu_shapes(2, 1), {"cpus": 2}, {"large": 1},
        [{"large": 1, "small": 2}, {"large": 0, "small": 2}],
    ),
}  # fmt: skip


def timeline(cluster: Cluster) -> list[dict[str, int]]:
    while not cluster.reached():
        cluster.tick()
        assert len(cluster.timeline) < ENOUGH_TICKS
    return cluster.timeline


@pytest.mark.parametrize("name", TIMELINES)
def test_a_switch_takes_these_steps(name: str) -> None:
    goal, shapes, budget, running, steps = TIMELINES[name]
    assert timeline(Cluster(goal, shapes, **budget).run(**running))[: len(steps)] == steps


def test_a_new_generation_of_the_same_shape_rolls_over_scarce_gpus() -> None:
    cluster = Cluster(RolloutGoal(key=NEW_SMALL, count=8), gpu_shapes(8, 1), gpus=8).run(small=8)
    old = [counts["small"] for counts in timeline(cluster)]
    assert [count for count in range(8, -1, -1) if count in old] == [4, 2, 1, 0]
    assert old == sorted(old, reverse=True)


@pytest.mark.parametrize(("gpus", "old"), [(8, [0]), (15, [0]), (16, [8, 0])])
def test_a_new_generation_of_a_shared_group_takes_all_its_gpus_or_none(gpus: int, old: list[int]) -> None:
    goal = RolloutGoal(key=NEW_SMALL, count=8, gap=True)
    steps = timeline(Cluster(goal, gpu_shapes(8, 1), gpus=gpus, groups=shared(8)).run(small=8))
    assert list(dict.fromkeys(counts["small"] for counts in steps)) == old
    assert {counts["small2"] for counts in steps} == ({0, 8} if len(old) == 1 else {8})


def test_one_of_two_old_layers_is_scaled_down_first() -> None:
    cluster = Cluster(RolloutGoal(key=LARGE, count=1), gpu_shapes(1, 1), gpus=2).run(small=1, small2=1)
    assert sum(timeline(cluster)[0].values()) == 1


ONE_STEP = {
    "cores are not overcommitted by one layer alone": (
        RolloutGoal(key=SMALL, count=4), {SMALL: Layer(wanted=1, ready=1)},
        cpu_shapes(2, 1), {"cpus": 2}, {SMALL: 2},
    ),
    "a scale-down waits while others drain": (
        RolloutGoal(key=SMALL, count=2),
        {SMALL: Layer(wanted=4, ready=4), LARGE: Layer(wanted=0, draining=1)},
        gpu_shapes(4, 1), {"gpus": 8}, {SMALL: 4, LARGE: 0},
    ),
    "a scale-down once the others are gone": (
        RolloutGoal(key=SMALL, count=2),
        {SMALL: Layer(wanted=4, ready=4), LARGE: Layer(wanted=0)},
        gpu_shapes(4, 1), {"gpus": 8}, {SMALL: 2, LARGE: 0},
    ),
    "a scale-up waits for the GPUs of its own draining replica": (
        RolloutGoal(key=SMALL, count=2), {SMALL: Layer(wanted=1, ready=1, draining=1)},
        gpu_shapes(4, 1), {"gpus": 2}, {SMALL: 1},
    ),
    "failing starts are scaled down although nothing is healthy": (
        RolloutGoal(key=NEW_SMALL, count=1), {SMALL: Layer(wanted=1, starting=1, failures=2)},
        gpu_shapes(4, 1), {"gpus": 1}, {SMALL: 0, NEW_SMALL: 0},
    ),
    "a replica that has not reported yet is kept": (
        RolloutGoal(key=NEW_SMALL, count=1), {SMALL: Layer(wanted=1)},
        gpu_shapes(4, 1), {"gpus": 1}, {SMALL: 1, NEW_SMALL: 0},
    ),
    "nothing is scaled down if that makes no room": (
        RolloutGoal(key=LARGE, count=1, gap=True), {SMALL: Layer(wanted=2, ready=2)},
        gpu_shapes(4, 1), {"gpus": 2}, {SMALL: 2, LARGE: 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_STEP)
def test_one_step(name: str) -> None:
    goal, layers, shapes, budget, counts = ONE_STEP[name]
    assert RolloutPlanner(goal, layers, shapes, total(ResourceBudget(**budget))).step() == counts


def test_unbounded_resources_hold_any_count() -> None:
    assert Resources(math.inf).holds(Resources(8)) > 1000
    assert Resources(3).holds(Resources(cpus=0)) > 1000
    assert (Resources(7).holds(Resources(2)), Resources(-4).holds(Resources(2))) == (3, 0)


@pytest.mark.parametrize(
    ("layer", "elapsed_s", "state"),
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
def test_the_verdict_on_a_goal(layer: Layer, elapsed_s: float, state: str) -> None:
    assert verdict(layer, elapsed_s, start_timeout_s=60.0) == state


@pytest.mark.parametrize(
    ("gpus", "min_healthy", "gap"),
    [(8, 1, True), (15, 1, False), (8, 0, False), (16, 1, False), (None, 1, False)],
)
def test_a_large_replica_over_all_gpus_needs_a_gap(gpus: int | None, min_healthy: int, gap: bool) -> None:
    goal = RolloutGoal(key=LARGE, count=1, min_healthy=min_healthy)
    layers = {SMALL: Layer(wanted=8, ready=8)}
    assert RolloutPlanner(goal, layers, gpu_shapes(8, 1), total(ResourceBudget(gpus=gpus))).needs_gap() is gap


@pytest.mark.parametrize(("key", "count", "stops"), [(NEW_SMALL, 2, False), (LARGE, 1, True)])
def test_a_gap_stops_all_only_if_none_can_stay(key: LayerKey, count: int, stops: bool) -> None:
    goal = RolloutGoal(key=key, count=count, min_healthy=min(2, count), gap=True)
    layers = {SMALL: Layer(wanted=2, ready=2)}
    rollout = RolloutPlanner(goal, layers, gpu_shapes(8, 4), total(ResourceBudget(gpus=8)))
    assert (rollout.needs_gap(), rollout.stops()) == (True, stops)
    assert rollout.keeps_others(rollout.step()) is not stops


def test_replacing_failing_replicas_needs_no_gap() -> None:
    new = LayerKey("m", "large", 2)
    layers = {LARGE: Layer(wanted=1, starting=1, failures=2)}
    footprints = gpu_shapes(8, 1) | {new: Resources(gpus=8)}
    rollout = RolloutPlanner(RolloutGoal(key=new, count=1), layers, footprints, total(ResourceBudget(gpus=8)))
    assert not rollout.needs_gap()
    for serves in (Layer(wanted=1, ready=1), Layer(wanted=1)):
        assert rollout._replace(layers={LARGE: serves}).needs_gap()


def test_the_gap_of_a_switch_in_progress_is_computed_from_its_current_state() -> None:
    layers = {SMALL: Layer(wanted=1, ready=1), LARGE: Layer(wanted=1, ready=1)}
    rollout = RolloutPlanner(
        RolloutGoal(key=LARGE, count=1), layers, gpu_shapes(8, 1), total(ResourceBudget(gpus=9))
    )
    assert not rollout.needs_gap()


def test_a_switch_that_is_closing_drains_nothing_yet() -> None:
    layers = {SMALL: Layer(wanted=8, ready=8)}
    goal = RolloutGoal(key=LARGE, count=1, gap=True, closing=True)
    rollout = RolloutPlanner(goal, layers, gpu_shapes(8, 1), total(ResourceBudget(gpus=8)))
    assert rollout.step() == {SMALL: 8, LARGE: 0}
    # It does so for replicas that serve, and for no others.
    assert rollout._replace(layers={SMALL: Layer(wanted=8, starting=8)}).step()[SMALL] < 8
