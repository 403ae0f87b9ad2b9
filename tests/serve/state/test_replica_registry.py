"""The registry: heartbeats in, versions and snapshots out."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from policy.scaling.reconcile_steps import LayerKey
from policy.types import EngineKind, Model, ReplicaLoad, ReplicaPhase
from serve.state.replica_registry import GONE_S, HUNG_S, UNHEARD_S, ReplicaRegistry
from tests.serve.replicas import replica

KEY = LayerKey("m", "small", 1)


@pytest.fixture
def registry() -> ReplicaRegistry:
    return ReplicaRegistry(epoch=5.0)


def version(registry: ReplicaRegistry) -> int:
    return registry.fleet(0.0).version


def test_load_changes_no_version(registry: ReplicaRegistry) -> None:
    assert registry.put(replica(), now=0.0)
    before = version(registry)
    # Adapters change many times a second; gateways get them from the replica itself.
    reported = replica(load=ReplicaLoad(at=2.0, in_flight=3), adapters=("sql@0123",))
    assert not registry.put(reported, now=0.5)
    assert version(registry) == before
    assert registry.fleet(0.5).replicas == (reported,)


@pytest.mark.parametrize(
    "change",
    [
        {"state": ReplicaPhase.DRAINING},
        {"url": "http://127.0.0.1:2"},
        {"incarnation": 1},
        {"reason": "why"},
        {"failures": 1},
        {"pid": 9},
    ],
)
def test_changes_are_new_versions(registry: ReplicaRegistry, change: dict[str, Any]) -> None:
    registry.put(replica(), now=0.0)
    before = registry.fleet(0.0)
    assert registry.put(replica(**change), now=0.5)
    assert registry.fleet(0.5).version > before.version


def test_stopped_replica_is_removed_once(registry: ReplicaRegistry) -> None:
    registry.put(replica(), now=0.0)
    assert registry.put(replica(state=ReplicaPhase.STOPPED), now=0.5)
    before = version(registry)
    assert not registry.put(replica(state=ReplicaPhase.STOPPED), now=0.6)
    assert (registry.fleet(0.6).replicas, version(registry)) == ((), before)


def test_heartbeat_during_the_probe_keeps_the_replica(registry: ReplicaRegistry) -> None:
    registry.put(replica(), now=0.0)
    (quiet,) = registry.silent(GONE_S + 1)
    registry.put(replica(), now=GONE_S + 1)
    assert not registry.give_up(quiet, GONE_S + 1, refused=True)
    assert len(registry.of(KEY)) == 1


def test_layers_list_replicas_in_order_of_arrival_and_the_fleet_by_id(registry: ReplicaRegistry) -> None:
    for made in (replica("b"), replica("a"), replica("c", shape="large"), replica("d", model="x")):
        registry.put(made, now=0.0)
    assert [r.id for r in registry.of(KEY)] == ["b", "a"]
    assert registry.keys("m") == {KEY, LayerKey("m", "large", 1)}
    assert [r.id for r in registry.fleet(0.0).replicas] == ["a", "b", "c", "d"]


def test_changed_models_are_a_new_version(registry: ReplicaRegistry) -> None:
    model = Model(name="m", engine=EngineKind.SIM, target=1)
    registry.set_models([model])
    before = version(registry)
    registry.set_models([model])
    assert version(registry) == before
    registry.set_models([msgspec.structs.replace(model, target=2)])
    assert version(registry) == before + 1


async def test_waiting_past_a_version_ends_with_a_change_or_a_timeout(registry: ReplicaRegistry) -> None:
    seen = version(registry)
    waiting = asyncio.ensure_future(registry.revision.past(seen, 3600.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    registry.put(replica(), now=0.0)
    await waiting
    # A reader of an older version does not wait; the timeout ends a wait without a change.
    await registry.revision.past(seen, 3600.0)
    await registry.revision.past(version(registry), 0.0)


def test_a_host_of_which_nothing_was_ever_heard_hangs(registry: ReplicaRegistry) -> None:
    """As one that was stopped before this controller began."""
    hosts = {f"m-small-g1-{part}": KEY for part in ("a1", "b2", "c3")}
    registry.put(replica("m-small-g1-a1"), now=0.0)
    # A host of Ray Serve has the unique part alone as its id.
    registry.put(replica("m-small-g1-b2"), now=0.0)
    registry.expect(hosts, now=0.0)
    registry.not_heard_until(50.0)
    registry.expect(hosts, now=UNHEARD_S + 49.0)
    assert registry.take_hung(UNHEARD_S + 49.0) == []
    (hung,) = registry.take_hung(UNHEARD_S + 51.0)
    assert (hung.id, LayerKey.of(hung)) == ("m-small-g1-c3", KEY)
    assert registry.take_hung(UNHEARD_S + 51.0) == []
    # One that was heard once and is silent is not judged twice.
    silent = registry.fleet(0.0).replicas[0]
    assert registry.give_up(silent, UNHEARD_S + 51.0, refused=True)
    registry.expect(hosts, now=UNHEARD_S + 51.0)
    assert [each.id for each in registry.take_hung(UNHEARD_S + 51.0 + HUNG_S)] == [silent.id]


def test_a_host_that_reports_late_or_ends_does_not_hang(registry: ReplicaRegistry) -> None:
    registry.expect({"m-small-g1-a1": KEY, "m-small-g1-b2": KEY}, now=0.0)
    registry.expect({"m-small-g1-a1": KEY}, now=UNHEARD_S)
    registry.put(replica("m-small-g1-a1"), now=UNHEARD_S)
    assert registry.take_hung(UNHEARD_S + 1.0) == []
