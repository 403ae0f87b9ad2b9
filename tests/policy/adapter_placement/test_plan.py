"""Adapter placement: invariants of every plan, and the timelines of a few."""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.adapter_placement.plan import plan
from policy.adapter_placement.types import (
    EMPTY,
    PlacementHost,
    PlacementParameters,
    PlacementPlan,
    PlacementReason,
    VersionDemand,
)
from policy.hashing import rendezvous

# Where every slot is planned, the arithmetic is easier to follow.
ALL = PlacementParameters(free=0)


def host(number: int, slots: int = 4, **more: object) -> PlacementHost:
    return PlacementHost(id=f"r{number}", key=(number + 1) * 0x9E3779B97F4A7C15 % 2**64, slots=slots, **more)  # type: ignore[arg-type]


def demand(name: str, rate: float, **more: object) -> VersionDemand:
    return VersionDemand(name=name, key=hash_of(name), rate=rate, **more)  # type: ignore[arg-type]


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode() * 8, "big") % 2**64


def zipf(count: int, **more: object) -> list[VersionDemand]:
    return [demand(f"a{k}", 10.0 / (k + 1), **more) for k in range(count)]


def where(made: PlacementPlan, name: str) -> tuple[str, ...]:
    return next((home.hosts for home in made.homes if home.name == name), ())


def why(made: PlacementPlan, name: str) -> str:
    return made.explain(name).split(";")[0]


# Seconds since the step before, replicas and demands.
Steps = list[tuple[float, list[PlacementHost], list[VersionDemand]]]
RATES = st.floats(0.0, 50.0, allow_nan=False)
HOSTS = st.lists(
    st.builds(
        lambda number, slots, seats: host(number, slots, seats=seats),
        st.integers(0, 7),
        st.integers(0, 6),
        st.sampled_from([8.0, 16.0, 64.0]),
    ),
    max_size=5,
    unique_by=lambda each: each.id,
)
DEMANDS = st.lists(
    st.builds(
        lambda number, rate, forecast, load_s, waiting, rank: demand(
            f"a{number}", rate, forecast=forecast, load_s=load_s, waiting=waiting, rank=rank
        ),
        st.integers(0, 30),
        RATES,
        RATES,
        st.sampled_from([0.05, 0.25]),
        st.integers(0, 2),
        st.sampled_from([8, 16, 64]),
    ),
    max_size=14,
    unique_by=lambda each: each.name,
)
STEPS = st.lists(st.tuples(st.floats(0.0, 90.0), HOSTS, DEMANDS), min_size=1, max_size=6)
BOUNDS = st.sampled_from([PlacementParameters(), ALL, PlacementParameters(copies=2, free=2)])


def timeline(steps: Steps, bounds: PlacementParameters) -> list[PlacementPlan]:
    plans, at = [EMPTY], 0.0
    for later, hosts, demands in steps:
        at += later
        plans.append(plan(hosts, demands, plans[-1], at, bounds))
    return plans[1:]


@pytest.mark.slow
@given(STEPS, BOUNDS)
def test_hold_lists_match_the_assignments_and_fit_the_slots(
    steps: Steps, bounds: PlacementParameters
) -> None:
    for (_, hosts, _), made in zip(steps, timeline(steps, bounds), strict=True):
        for each in hosts:
            assert len(made.hold.get(each.id, ())) <= each.slots
        assigned = {(home.name, host) for home in made.homes for host in home.hosts}
        held = {(name, host) for host, names in made.hold.items() for name in names}
        assert not made.hold or assigned == held


@pytest.mark.slow
@given(STEPS, BOUNDS)
def test_a_version_moves_once_a_minute_unless_its_replica_is_gone(
    steps: Steps, bounds: PlacementParameters
) -> None:
    moved: dict[str, float] = {}
    before = EMPTY
    for (_, hosts, demands), made in zip(steps, timeline(steps, bounds), strict=True):
        there = {each.id for each in hosts if each.slots}
        asked = {each.name for each in demands if each.expected > 0.0}
        had = {home.name: set(home.hosts) for home in before.homes}
        for name in {move.name for move in made.moves if move.target or move.name in asked}:
            old, new = had.get(name, set()), set(where(made, name))
            # A first assignment is no move, and neither is one replica fewer.
            if not old or (new and new <= old):
                continue
            if name in moved and old & there:
                assert made.at - moved[name] >= bounds.move_s or not new - old
            moved[name] = made.at
        before = made


@pytest.mark.slow
@given(HOSTS, DEMANDS, BOUNDS)
def test_requested_versions_fill_the_slots(
    hosts: list[PlacementHost], demands: list[VersionDemand], bounds: PlacementParameters
) -> None:
    made = plan(hosts, demands, EMPTY, 0.0, bounds)
    room = sum(max(1, each.slots - made.free) for each in hosts if each.slots)
    homes = {home.name: len(home.hosts) for home in made.homes}
    asked = {each.name for each in demands if each.expected > 0.0}
    assert sum(homes.values()) <= room
    if sum(homes.values()) < room and room:
        assert {name for name, count in homes.items() if count} == asked


@pytest.mark.slow
@given(STEPS, BOUNDS, st.randoms(use_true_random=False))
def test_the_order_of_hosts_and_demands_does_not_matter(
    steps: Steps, bounds: PlacementParameters, random: Random
) -> None:
    shuffled = []
    for later, hosts, demands in steps:
        mixed = (hosts[:], demands[:])
        for each in mixed:
            random.shuffle(each)
        shuffled.append((later, *mixed))
    for one, other in zip(timeline(steps, bounds), timeline(shuffled, bounds), strict=True):
        assert (one.homes, one.hold, one.moves) == (other.homes, other.hold, other.moves)


@pytest.mark.slow
@given(STEPS, BOUNDS)
def test_a_plan_from_its_own_result_moves_nothing(steps: Steps, bounds: PlacementParameters) -> None:
    made = timeline(steps, bounds)[-1]
    _, hosts, demands = steps[-1]
    again = plan(hosts, demands, made, made.at, bounds)
    assert not again.moves and again.hold == made.hold


@pytest.mark.slow
@given(st.integers(2, 6), st.lists(st.floats(0.5, 1.0), min_size=30, max_size=60))
def test_load_stays_within_the_bound_when_possible(replicas: int, rates: list[float]) -> None:
    """Many small demands with slots for all: a first plan, and one after a replica was added."""
    hosts = [host(number, slots=80) for number in range(replicas + 1)]
    demands = [demand(f"a{number}", rate) for number, rate in enumerate(rates)]
    first = plan(hosts[1:], demands, EMPTY, 0.0)
    assert max(first.load.values()) <= 1.25
    later = plan(hosts, demands, first, 60.0)
    assert max(later.load.values()) <= 1.25 + 1e-6


@given(st.integers(2, 5), st.integers(1, 39))
def test_a_removed_replica_moves_only_its_own_versions(replicas: int, count: int) -> None:
    hosts = [host(number, slots=40) for number in range(replicas)]
    bounds = PlacementParameters(load=100.0)
    first = plan(hosts, zipf(count), EMPTY, 0.0, bounds)
    second = plan(hosts[1:], zipf(count), first, 1.0, bounds)
    assert {move.name for move in second.moves} == set(first.hold["r0"])
    assert all(move.source == "r0" and move.target for move in second.moves)


def test_a_new_replica_gets_only_what_evens_the_load() -> None:
    hosts = [host(number, slots=40) for number in range(4)]
    first = plan(hosts[:3], zipf(60), EMPTY, 0.0)
    second = plan(hosts, zipf(60), first, 1.0)
    assert 1 <= len(second.moves) <= 3 and second.hold["r3"]
    assert max(second.load.values()) <= 1.25
    assert not plan(hosts, zipf(60), second, 100.0).moves


def test_assignments_follow_rendezvous_hashing() -> None:
    hosts = [host(number) for number in range(4)]
    made = plan(hosts, [demand("a", 1.0)], EMPTY, 0.0)
    best = max(hosts, key=lambda each: rendezvous(hash_of("a"), each.key, each.seats))
    assert where(made, "a") == (best.id,)
    assert made.explain("a") == f"{PlacementReason.CLAIMED}; 1 requests/s times 0.25 s of a load"
    assert why(plan(hosts, [demand("a", 1.0)], made, 5.0), "a") == PlacementReason.KEPT


def test_a_loaded_version_is_assigned_there() -> None:
    for number in range(3):
        hosts = [host(i, resident=frozenset({"a"} if i == number else ())) for i in range(3)]
        made = plan(hosts, [demand("a", 1.0)], EMPTY, 0.0)
        assert where(made, "a") == (f"r{number}",) and why(made, "a") == PlacementReason.RESIDENT


def test_a_version_that_a_replica_refused_is_assigned_elsewhere_or_nowhere() -> None:
    made = plan([host(0)], [demand("a", 1.0)], EMPTY, 0.0)
    refusing = host(0, refused=frozenset({"a"}))
    assert where(plan([refusing, host(1)], [demand("a", 1.0)], made, 1.0), "a") == ("r1",)
    nowhere = plan([refusing], [demand("a", 1.0)], made, 1.0)
    assert nowhere.explain("a") == PlacementReason.NOWHERE and nowhere.hold == {"r0": ()}


def test_slots_go_to_the_versions_with_the_highest_reload_cost() -> None:
    demands = [demand("often", 3.0, load_s=0.1), demand("dear", 1.0, load_s=1.0), demand("rare", 0.1)]
    made = plan([host(0, slots=2)], demands, EMPTY, 0.0, ALL)
    assert made.hold["r0"] == ("dear", "often")
    assert made.explain("rare") == PlacementReason.ON_DEMAND


def test_slots_are_reserved_for_loads_on_demand() -> None:
    """One, or as many as those requests use at once, at most half."""
    for slots, load_s, held in ((1, 0.001, 1), (8, 0.001, 7), (8, 0.1, 5), (8, 9.0, 4)):
        made = plan([host(0, slots=slots)], zipf(30, load_s=load_s), EMPTY, 0.0)
        assert len(made.hold["r0"]) == held


def test_a_version_loses_its_slot_only_to_a_quarter_more_value() -> None:
    hosts = [host(0, slots=1)]
    made = plan(hosts, [demand("a", 1.0)], EMPTY, 0.0)
    assert plan(hosts, [demand("a", 1.0), demand("b", 1.2)], made, 60.0).hold["r0"] == ("a",)
    taken = plan(hosts, [demand("a", 1.0), demand("b", 1.3)], made, 60.0)
    assert taken.hold["r0"] == ("b",)
    assert [(move.name, move.source, move.target) for move in taken.moves] == [
        ("b", "", "r0"),
        ("a", "r0", ""),
    ]
    assert taken.explain("a") == PlacementReason.DISPLACED


def test_a_displaced_version_does_not_return_within_a_minute() -> None:
    hosts = [host(0, slots=1)]
    made = plan(hosts, [demand("a", 1.0)], EMPTY, 0.0)
    made = plan(hosts, [demand("a", 1.0), demand("b", 2.0)], made, 100.0)
    made = plan(hosts, [demand("a", 9.0), demand("b", 2.0)], made, 159.0)
    assert made.hold["r0"] == ("b",)
    assert plan(hosts, [demand("a", 9.0), demand("b", 2.0)], made, 161.0).hold["r0"] == ("a",)


def test_a_forecast_counts_before_the_requests_arrive() -> None:
    hosts = [host(0, slots=1)]
    made = plan(hosts, [demand("a", 1.0)], EMPTY, 0.0)
    rising = demand("b", 0.1, forecast=2.0)
    assert plan(hosts, [demand("a", 1.0), rising], made, 60.0).hold["r0"] == ("b",)


def test_the_number_of_replicas_follows_the_occupied_seats() -> None:
    hosts = [host(number, seats=10.0) for number in range(4)]
    for rate, homes in ((2.4, 1), (2.6, 2), (5.1, 3), (90.0, 4)):
        others = [demand(f"o{number}", 50.0, service_s=0.01) for number in range(4)]
        made = plan(hosts, [demand("a", rate, service_s=2.0), *others], EMPTY, 0.0)
        assert len(where(made, "a")) == homes
    made = plan(hosts, [demand("a", 90.0, service_s=2.0)], EMPTY, 0.0, PlacementParameters(copies=2))
    assert len(where(made, "a")) == 2


def test_waiting_requests_add_a_replica_soon_and_idleness_removes_one_later() -> None:
    hosts = [host(number) for number in range(4)]
    others = [demand(f"o{number}", 2.0) for number in range(4)]

    def homes(made: PlacementPlan, at: float, waiting: int) -> tuple[PlacementPlan, int]:
        made = plan(hosts, [demand("a", 1.0, waiting=waiting), *others], made, at)
        return made, len(where(made, "a"))

    made, count = homes(EMPTY, 0.0, 1)
    counts = []
    for at, waiting in ((9.0, 1), (10.0, 1), (21.0, 1), (71.0, 1), (72.0, 0), (671.0, 0), (673.0, 0)):
        made, count = homes(made, at, waiting)
        counts.append(count)
    # The third is due after 20 seconds, and comes when a minute has passed since the second.
    assert counts == [1, 2, 2, 3, 3, 3, 2]


def test_equal_ranks_share_a_replica_when_load_is_low() -> None:
    hosts = [host(number, slots=20) for number in range(2)]
    demands = [demand(f"a{number}", 1.0, rank=8 if number % 2 else 64) for number in range(16)]
    made = plan(hosts, demands, EMPTY, 0.0, ALL)
    ranks = {each.name: each.rank for each in demands}
    mixed = [Counter(ranks[name] for name in names) for names in made.hold.values()]
    assert any(PlacementReason.ALIKE in home.why for home in made.homes)
    assert all(max(counts.values()) >= 7 for counts in mixed)
    assert max(made.load.values()) <= 1.25


def test_without_free_slots_loads_are_evened_by_exchanges() -> None:
    hosts = [host(0, slots=2), host(1, slots=2)]
    made = plan(hosts, [demand(name, 1.0) for name in "abcd"], EMPTY, 0.0, ALL)
    heavy = made.hold["r0"]
    demands = [demand(name, 8.0 if name in heavy else 1.0) for name in "abcd"]
    later = plan(hosts, demands, made, 60.0, ALL)
    assert len(later.moves) == 2 and max(later.load.values()) <= 1.25
    assert {why(later, move.name) for move in later.moves} == {PlacementReason.EVENED}
    assert all(move.source and move.target for move in later.moves)


def test_exchanges_between_many_full_replicas_cost_little() -> None:
    """Each compared all pairs of versions of all replicas, and looked at all versions for each pair."""
    hosts = [host(number, slots=16) for number in range(16)]
    demands = [demand(f"a{number}", 1.0 + number / 1000) for number in range(256)]
    made = plan(hosts, demands, EMPTY, 0.0, ALL)
    hot = {name for each in hosts[:8] for name in made.hold[each.id]}
    demands = [demand(each.name, each.rate * (8.0 if each.name in hot else 1.0)) for each in demands]
    with cProfile.Profile() as profile:
        later = plan(hosts, demands, made, 60.0, ALL)
    exchanged = len(later.moves) / 2
    assert exchanged > 20 and max(later.load.values()) <= 1.25
    stats: Any = pstats.Stats(profile)
    assert stats.total_calls < 10_000 * exchanged


def test_assignments_survive_a_time_without_replicas() -> None:
    hosts = [host(number) for number in range(2)]
    made = plan(hosts, zipf(4), EMPTY, 0.0)
    gone = plan([], zipf(4), made, 1.0)
    assert gone.hold == {} and gone.homes == made.homes
    assert plan(hosts, zipf(4), gone, 2.0).hold == made.hold


def test_the_placement_rule_of_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs/extending.md").read_text()
    code = text[text.index("## How do I add a placement rule?") :].split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - the code of the page
    hosts = [host(number, slots=2) for number in range(2)]
    made = names["newest"](hosts, [demand(name, 1.0) for name in "ab"], EMPTY, 0.0)
    assert made.hold == {"r0": ("a", "b")}
    later = names["newest"](hosts, [demand(name, 1.0) for name in "abc"], made, 5.0)
    assert later.hold == {"r0": ("c", "a")} and later.explain("c") == "new"


@pytest.mark.parametrize("count", [0, 3])
def test_a_plan_without_demand_is_empty(count: int) -> None:
    made = plan([host(0)], [demand(f"a{number}", 0.0) for number in range(count)], EMPTY, 0.0)
    assert made.homes == () and made.hold == {"r0": ()} and made.load == {"r0": 0.0}
