"""Demand: heartbeats become rates, hit rates and failures; the tests set the time."""

from __future__ import annotations

from typing import Any

import pytest

from policy.adapter_placement.slots import HALF_LIFE_S
from policy.types import ReplicaPhase
from policy.wire.adapter_catalog import served_name
from policy.wire.heartbeat import AdapterRef, AdapterUse, Heartbeat
from serve.adapters import adapter_demand as module
from serve.adapters.adapter_demand import AGAIN_S, REFUSING_S, WAITS_S, AdapterDemandTracker
from tests.serve.replicas import replica

SQL = AdapterRef(name="sql", digest="a" * 64)
SERVED = served_name(SQL.name, SQL.digest)


def use(wanted: AdapterRef = SQL, **done: Any) -> AdapterUse:
    return AdapterUse(name=wanted.name, digest=wanted.digest, **done)


def beat(*uses: AdapterUse, name: str = "r1", **over: Any) -> Heartbeat:
    return Heartbeat(replica=replica(name, **over), uses=uses)


def test_rates_are_summed_by_model_and_decay_by_half_life() -> None:
    demand = AdapterDemandTracker()
    for second in range(600):
        demand.note(beat(use(requests=1)), float(second))
        demand.note(beat(use(requests=2), name="r2"), float(second))
        demand.note(beat(use(requests=5), name="x1", model="x"), float(second))
    assert demand.usage("x", SQL, 600.0).rate == pytest.approx(5.0, rel=0.02)
    assert demand.usage("m", SQL, 600.0).rate == pytest.approx(3.0, rel=0.02)
    later = demand.usage("m", SQL, 600.0 + HALF_LIFE_S)
    assert (later.rate, later.last_used) == (pytest.approx(1.5, rel=0.02), 599.0)


def test_a_rise_of_the_rate_needs_several_requests() -> None:
    demand = AdapterDemandTracker()
    demand.note(beat(use(requests=2)), 0.0)
    assert demand.usage("m", SQL, 0.0).rising == 0.0
    for second in range(1, 20):
        demand.note(beat(use(requests=4)), float(second))
    usage = demand.usage("m", SQL, 20.0)
    assert usage.rising > 2 * usage.rate
    # A constant rate does not rise.
    for second in range(20, 600):
        demand.note(beat(use(requests=4)), float(second))
    usage = demand.usage("m", SQL, 600.0)
    assert usage.rising == 0.0 or usage.rising < 1.1 * usage.rate


def test_usage_has_the_hit_rate_and_the_mean_load_and_service_times() -> None:
    demand = AdapterDemandTracker()
    demand.note(beat(use(requests=4, found=3, loads=1, load_s=0.5, busy_s=8.0)), 1.0)
    demand.note(beat(use(loads=1, load_s=0.7)), 1.0)
    usage = demand.usage("m", SQL, 1.0)
    assert (usage.hit_rate, usage.loads, usage.load_s, usage.service_s) == (0.75, 2, pytest.approx(0.6), 2.0)
    assert demand.usage("m", SQL, 61.0).hit_rate == pytest.approx(0.75)


def test_least_recently_used_version_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VERSIONS", 2)
    demand = AdapterDemandTracker()
    one, two, three = (AdapterRef(name=name, digest="b" * 64) for name in ("one", "two", "three"))
    for at, wanted in enumerate((one, two, one, three)):
        demand.note(beat(use(wanted, requests=1)), float(at))
    assert [demand.usage("m", each, 4.0).rate > 0 for each in (one, two, three)] == [True, False, True]


def test_the_waiting_count_is_that_of_the_last_recent_report() -> None:
    demand = AdapterDemandTracker()
    demand.note(beat(use(waiting=3)), 0.0)
    demand.note(beat(use(waiting=2), name="r2"), 0.0)
    demand.note(beat(), 0.5)
    assert demand.usage("m", SQL, 0.5).waiting == 5
    demand.note(beat(use(requests=1)), 1.0)
    assert demand.usage("m", SQL, 1.0).waiting == 2
    assert demand.usage("m", SQL, WAITS_S).waiting == 0


def test_failed_load_is_kept_until_a_load_succeeds() -> None:
    demand = AdapterDemandTracker()
    demand.note(beat(use(failed="tensor_shape: why")), 1.0)
    demand.note(beat(use(requests=1)), 2.0)
    assert demand.failures(SQL)["r1"].reason == "tensor_shape: why"
    assert demand.refusing("r1", 2.0) == {SQL}
    demand.note(beat(use(loads=1)), 3.0)
    assert (demand.failures(SQL), demand.refusing("r1", 3.0)) == ({}, frozenset())


def test_failed_load_is_retried_before_it_expires_and_may_fail_again() -> None:
    demand = AdapterDemandTracker()
    other = AdapterRef(name="law", digest="b" * 64)
    demand.note(beat(use(failed="once"), use(other, failed="again and again")), 1.0)
    retry_at = 1.0 + REFUSING_S + AGAIN_S / 2
    demand.note(beat(use(other, failed="again and again")), retry_at)
    assert set(demand.failures(SQL)) == {"r1"}
    assert demand.refusing("r1", retry_at) == {other}
    demand.note(beat(), 1.0 + REFUSING_S + AGAIN_S)
    assert demand.failures(SQL) == {}
    assert set(demand.failures(other)) == {"r1"}


@pytest.mark.parametrize(
    "after", [{"adapters": (SERVED,)}, {"incarnation": 1}, {"state": ReplicaPhase.STOPPED}]
)
def test_failed_load_is_dropped_with_its_engine(after: dict[str, Any]) -> None:
    demand = AdapterDemandTracker()
    demand.note(beat(use(failed="why")), 1.0)
    demand.note(beat(**after), 2.0)
    assert demand.failures(SQL) == {}


def test_lost_replicas_are_dropped() -> None:
    demand = AdapterDemandTracker()
    demand.note(beat(use(failed="why", waiting=1)), 1.0)
    demand.note(beat(use(failed="why"), name="r2"), 1.0)
    demand.keep(["r2"])
    assert set(demand.failures(SQL)) == {"r2"}
    assert demand.usage("m", SQL, 1.0).waiting == 0


def test_failures_of_a_replica_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    demand = AdapterDemandTracker()
    many = [AdapterRef(name=f"a{i}", digest="c" * 64) for i in range(4)]
    for wanted in many:
        demand.note(beat(use(wanted, failed="why")), 1.0)
    assert demand.refusing("r1", 1.0) == set(many[2:])
