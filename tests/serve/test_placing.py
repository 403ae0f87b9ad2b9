"""Placing: plans become what each replica is told to hold."""

from __future__ import annotations

from typing import Any

import pytest

from policy.catalog import Alias, Version, served_name
from policy.types import Beat, Load, Orders, Replica, ReplicaState, Use, Wanted
from serve.demand import Demand
from serve.placing import PLAN_S, Placing


def version(number: int, letter: str) -> Version:
    return Version(number=number, digest=letter * 64, rank=8, size=10, source="/a", at=0.0)


def alias(name: str, *versions: Version, split: tuple[tuple[int, float], ...] = ((1, 1.0),)) -> Alias:
    return Alias(model="m", name=name, revision=1, versions=versions, split=split)


def replica(name: str, **over: Any) -> Replica:
    fields: dict[str, Any] = {
        "id": name, "model": "m", "shape": "small", "generation": 1, "state": ReplicaState.READY,
        "load": Load(at=0.0, bound=8),
    }  # fmt: skip
    return Replica(**fields | over)


def wanted(alias: Alias, number: int = 1) -> Wanted:
    found = alias.version(number)
    assert found is not None
    return Wanted(name=alias.name, digest=found.digest)


@pytest.fixture
def demand() -> Demand:
    return Demand()


@pytest.fixture
def placing(demand: Demand) -> Placing:
    return Placing(demand, lambda replica: 3)


SQL = alias("sql", version(1, "a"), version(2, "b"))
LAW = alias("law", version(1, "c"))


def asked(demand: Demand, of: Wanted, requests: int = 50, at: float = 0.0) -> None:
    use = Use(name=of.name, digest=of.digest, requests=requests)
    demand.note(Beat(replica=replica("r1"), uses=(use,)), at)


def test_what_is_asked_for_is_held_somewhere(demand: Demand, placing: Placing) -> None:
    asked(demand, wanted(SQL))
    asked(demand, wanted(LAW))
    placing.plan("m", [replica("r1"), replica("r2")], [SQL, LAW], 0.0)
    held = [each for name in ("r1", "r2") for each in placing.orders(name).hold or ()]
    assert set(held) == {wanted(SQL), wanted(LAW)}
    assert placing.why("m", served_name("sql", "a" * 64))


def test_without_any_demand_replicas_are_told_nothing(placing: Placing) -> None:
    placing.plan("m", [replica("r1")], [SQL], 0.0)
    assert placing.orders("r1") == Orders(hold=None)
    assert not placing.lacks(replica("r1"))
    assert placing.lacks(replica("r2"))
    assert not placing.lacks(replica("r2", state=ReplicaState.DRAINING))


def test_a_replica_that_starts_has_its_part_of_the_plan(demand: Demand, placing: Placing) -> None:
    many = [alias(f"a{i}", version(1, f"{i:x}")) for i in range(4)]
    for each in many:
        asked(demand, wanted(each))
    placing.plan("m", [replica("r1")], many, 0.0)
    assert placing.orders("r2") == Orders(hold=None)
    placing.plan("m", [replica("r1"), replica("r2", state=ReplicaState.STARTING)], many, PLAN_S)
    assert placing.orders("r2").hold


@pytest.mark.parametrize("state", [ReplicaState.DRAINING, ReplicaState.STOPPED])
def test_one_that_leaves_has_none(demand: Demand, placing: Placing, state: ReplicaState) -> None:
    asked(demand, wanted(SQL))
    placing.plan("m", [replica("r1", state=state), replica("r2")], [SQL], 0.0)
    assert placing.orders("r1") == Orders(hold=None)
    assert placing.orders("r2").hold == (wanted(SQL),)


def test_what_a_name_will_stand_for_is_prefetched(demand: Demand, placing: Placing) -> None:
    asked(demand, wanted(SQL, 1))
    moved = alias("sql", *SQL.versions, split=((2, 1.0),))
    placing.plan("m", [replica("r1")], [moved], 0.0)
    assert wanted(SQL, 2) in (placing.orders("r1").hold or ())


def test_a_name_that_was_removed_is_held_no_more(demand: Demand, placing: Placing) -> None:
    asked(demand, wanted(SQL))
    asked(demand, wanted(LAW))
    placing.plan("m", [replica("r1")], [SQL, LAW], 0.0)
    placing.plan("m", [replica("r1")], [LAW], PLAN_S)
    assert placing.orders("r1").hold == (wanted(LAW),)
    placing.plan("m", [replica("r1")], [], 2 * PLAN_S)
    assert placing.orders("r1").hold == ()


def test_who_refused_it_is_left_alone(demand: Demand, placing: Placing) -> None:
    asked(demand, wanted(SQL))
    failed = Use(name="sql", digest="a" * 64, failed="why")
    demand.note(Beat(replica=replica("r1"), uses=(failed,)), 0.0)
    placing.plan("m", [replica("r1")], [SQL], 0.0)
    assert placing.orders("r1").hold == ()
    placing.plan("m", [replica("r1"), replica("r2")], [SQL], 1.0)
    assert placing.orders("r2").hold == (wanted(SQL),)


def test_plans_are_due_every_few_seconds(demand: Demand, placing: Placing) -> None:
    assert placing.due("m", 0.0)
    placing.plan("m", [], [], 0.0)
    assert not placing.due("m", PLAN_S - 0.1)
    assert placing.due("m", PLAN_S)


def test_models_and_replicas_that_are_gone_are_forgotten(demand: Demand, placing: Placing) -> None:
    asked(demand, wanted(SQL))
    placing.plan("m", [replica("r1"), replica("r2")], [SQL], 0.0)
    placing.keep(["m"], ["r2"])
    assert placing.orders("r1") == Orders(hold=None)
    placing.keep([], [])
    assert placing.due("m", 1.0)
    assert placing.holds == {}
