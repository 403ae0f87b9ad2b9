"""A worker's view of replicas: from the controller, from their load streams, and from its own counts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from msgspec import structs

from gateway.control.controller_feed import fleet_replaces
from gateway.routing.discovered_server import external_replica
from gateway.routing.external_server_options import ServerAccess
from gateway.routing.fleet import RESTART_S, SETTLE_S, SNAPSHOT_STALE_S, FleetView
from gateway.routing.fleet_listeners import NO_EVENTS, FleetListeners
from gateway.routing.outlier_ejection import new_stalls
from gateway.routing.replica_handle import STALE_S, ReplicaHandle
from gateway.routing.shared_counters import SharedRows
from gateway.telemetry.metrics import WorkerMetrics
from policy.deployment_file.parse import parse
from policy.hashing import hash_name
from policy.routing.replica_health import AttemptResult
from policy.scaling.reconcile_steps import LayerKey
from policy.types import EngineKind, FleetSnapshot, Model, Replica, ReplicaLoad, ReplicaPhase, Runner
from policy.wire.load_stream import CachedPrefix, LoadReport
from tests.gateway.fake_replica import ready_replica

MODEL = Model(name="alpha", runner=Runner.GENERATE, engine=EngineKind.SIM)
READY = b'{"state":"ready","load":{"at":1,"bound":8}}'
DRAINING = b'{"state":"draining","load":{"at":1,"bound":8}}'
RESTARTED_AT = 50.0
LOAD = ReplicaLoad(at=0.0, bound=8)


def fleet(epoch: float, *ids: str, version: int = 1) -> FleetSnapshot:
    return with_replicas(
        *(ready_replica(id_, "alpha", load=LOAD) for id_ in ids), epoch=epoch, version=version
    )


def with_replicas(
    *replicas: Replica, model: Model = MODEL, epoch: float = 1.0, version: int = 1
) -> FleetSnapshot:
    return FleetSnapshot(epoch=epoch, version=version, at=0.0, models=(model,), replicas=replicas)


def in_states(states: Sequence[ReplicaPhase], model: Model = MODEL) -> FleetSnapshot:
    """A fleet with one replica in each state."""
    return with_replicas(
        *(ready_replica(f"r{i}", "alpha", state=state) for i, state in enumerate(states)), model=model
    )


class View(FleetView):
    """A view that follows two replicas of one controller."""

    def __init__(self) -> None:
        super().__init__("", WorkerMetrics())
        self.take(fleet(1.0, "one", "two"), "controller", 10.0)

    def report(self, line: bytes) -> None:
        """A line in the load streams of both replicas."""
        for handle in self.models[0].handles:
            handle.count(line, 0.0)

    @property
    def ids(self) -> list[str]:
        return [handle.id for handle in self.models[0].handles]


@pytest.fixture
async def view() -> AsyncIterator[View]:
    view = View()
    yield view
    view.close()


async def test_a_restarted_controller_keeps_replicas_that_are_still_ready(view: View) -> None:
    view.report(READY)
    kept = list(view.models[0].handles)
    view.take(fleet(2.0), "controller", RESTARTED_AT)
    assert view.models[0].handles == kept
    assert all(handle.admissible for handle in kept)
    view.take(fleet(2.0, "two", version=2), "controller", RESTARTED_AT + SETTLE_S - 0.1)
    assert sorted(view.ids) == ["one", "two"]


async def test_a_restarted_controller_is_followed_after_the_settle_time(view: View) -> None:
    view.report(READY)
    view.take(fleet(2.0), "controller", RESTARTED_AT)
    view.take(fleet(2.0, "two", version=2), "controller", RESTARTED_AT + SETTLE_S)
    assert view.ids == ["two"]


async def test_a_snapshot_of_the_same_controller_applies_at_once(view: View) -> None:
    view.report(READY)
    view.take(fleet(1.0, "two", version=2), "controller", RESTARTED_AT)
    assert view.ids == ["two"]


@pytest.mark.parametrize("line", [None, DRAINING], ids=["silent", "draining"])
async def test_a_replica_that_is_not_ready_itself_is_dropped(view: View, line: bytes | None) -> None:
    if line is not None:
        view.report(line)
    view.take(fleet(2.0), "controller", RESTARTED_AT)
    assert view.ids == []


async def test_a_removed_model_removes_its_replicas(view: View) -> None:
    view.report(READY)
    view.take(FleetSnapshot(epoch=2.0, version=1, at=0.0), "controller", RESTARTED_AT)
    assert view.models == []


async def test_a_load_line_looks_at_few_replicas_and_those_up_are_counted_for_the_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked, changed = Mock(return_value=True), Mock()
    monkeypatch.setattr(ReplicaHandle, "admissible", property(looked))
    metrics = WorkerMetrics()
    view = FleetView("", metrics, events=FleetListeners(changed=changed))
    view.take(fleet(1.0, *(f"r{i}" for i in range(100))), "controller", 10.0)
    looked.reset_mock()
    changed.reset_mock()
    view.replica_changed(view.models[0])
    changed.assert_called_once_with("alpha")
    assert looked.call_count == 1
    view.count_up()
    assert metrics.model("alpha").replicas_up == 100
    looked.return_value = False
    view.models[0].handles[7].full = True
    view.replica_changed(view.models[0])
    view.count_up()
    assert (changed.call_count, metrics.model("alpha").replicas_up) == (2, 1)
    view.models[0].handles[7].full = False
    view.replica_changed(view.models[0])
    assert changed.call_count == 2
    view.take(FleetSnapshot(epoch=1.0, version=2, at=0.0), "controller", 11.0)
    view.count_up()
    assert math.isnan(metrics.model("alpha").replicas_up)
    view.take(with_replicas(version=3), "controller", 12.0)
    view.count_up()
    assert metrics.model("alpha").replicas_up == 0
    view.close()


def test_an_empty_fleet_of_a_controller_that_just_started_is_not_kept() -> None:
    good = fleet(1.0, "one", "two", version=7)
    assert not fleet_replaces(good, good)
    assert not fleet_replaces(fleet(2.0), good)
    assert fleet_replaces(fleet(2.0, "two"), good)
    assert fleet_replaces(fleet(1.0, version=8), good)
    assert fleet_replaces(fleet(2.0), fleet(1.0))


def handle(replica: Replica | None = None, events: FleetListeners = NO_EVENTS) -> ReplicaHandle:
    made = ReplicaHandle(replica or fleet(1.0, "one").replicas[0], 1.0, None, events=events)
    made.count(READY, 0.0)
    return made


def line(**load: float) -> bytes:
    return json.dumps({"state": "ready", "load": {"at": 1, "bound": 8, **load}}).encode()


def test_own_requests_are_counted_whatever_the_replica_reports() -> None:
    one = handle()
    one.begin(100)
    one.begin(50)
    for value in (0, 1, -3, 10**9):
        one.count(line(in_flight=value, pending_tokens=-7, kv_used=value), 1.0)
        assert (one.in_flight, one.look().pending_tokens) == (2, 150)
        assert 0.0 <= one.view.kv_used <= 1.0
    one.count(line(in_flight=5, pending_tokens=400), 2.0)
    assert (one.in_flight, one.look().pending_tokens) == (5, 400)
    one.first_token(100, 2.0)
    one.end()
    assert (one.in_flight, one.look().pending_tokens) == (4, 300)


def test_a_stale_report_is_dropped() -> None:
    one = handle()
    one.begin(100)
    one.count(line(in_flight=5, pending_tokens=400, kv_used=0.9), 2.0)
    one.age(2.0 + STALE_S)
    assert one.in_flight == 5
    one.age(2.1 + STALE_S)
    assert (one.in_flight, one.look().pending_tokens, one.view.kv_used) == (1, 100, 0.0)
    assert one.admissible


def test_a_replaced_process_resets_cache_and_breaker() -> None:
    replica = fleet(1.0, "one").replicas[0]
    forgotten: list[int] = []
    one = handle(replica, FleetListeners(forgotten=lambda model, key: forgotten.append(key)))
    for _ in range(4):
        one.health.record(one.breaker, AttemptResult.BAD, 0.0)
    one.become(msgspec.structs.replace(replica, adapters=("sql",)), 1.0)
    assert forgotten == []
    one.become(msgspec.structs.replace(replica, incarnation=1), 1.0)
    one.become(msgspec.structs.replace(replica, incarnation=1, pid=7), 1.0)
    assert forgotten == [one.view.key, one.view.key]
    assert one.breaker.streak == 0


def test_reported_prefixes_reach_the_listener() -> None:
    lines: list[LoadReport] = []
    one = handle(events=FleetListeners(prefixes=lambda model, key, line: lines.append(line)))
    one.count(b'{"state":"ready","load":{"at":1},"prefixes":[18446744073709551615,1]}', 1.0)
    one.count(READY, 2.0)
    one.count(
        b'{"state":"ready","load":{"at":1},"reset":true,"held":[[2,64],[4,64,32]],"gone":[[6,16]]}', 3.0
    )
    assert [line.prefixes for line in lines] == [(2**64 - 1, 1), ()]
    assert lines[1].held == (CachedPrefix(2, 64), CachedPrefix(4, 64, 32))
    assert (lines[1].reset, lines[1].gone) == (True, (CachedPrefix(6, 16),))


def test_a_half_open_breaker_admits_one_probe() -> None:
    one, other = handle(), handle()
    other.health.leave(other.breaker)
    one.health.breakers.append(other.breaker)  # so that something else serves
    for _ in range(5):
        one.health.record(one.breaker, AttemptResult.BAD, 0.0)
    assert not one.admissible
    one.breaker.half_open()
    assert one.admissible
    assert one.begin()
    assert not one.admissible
    one.end()
    one.breaker.probed(AttemptResult.NOTHING, 0.0, 0.0)
    assert one.admissible
    assert one.begin()
    assert not one.begin()


@pytest.mark.parametrize(
    ("states", "target", "is_unavailable"),
    [
        ([ReplicaPhase.READY], 1, True),
        ([ReplicaPhase.READY], 2, False),
        ([ReplicaPhase.READY, ReplicaPhase.STARTING], 1, False),
        ([], 0, False),
    ],
    ids=["all are there", "one is missing", "one starts", "scaled to zero"],
)
async def test_unavailable_models(states: list[ReplicaPhase], target: int, is_unavailable: bool) -> None:
    snapshot = in_states(states, msgspec.structs.replace(MODEL, target=target))
    view = FleetView("", WorkerMetrics())
    view.take(snapshot, "controller", 10.0)
    served = view.models[0]
    assert not served.is_unavailable(10.0 + RESTART_S)  # its host may be starting it again
    view.take(snapshot, "controller", 10.1 + RESTART_S)
    assert served.is_unavailable(10.1 + RESTART_S) == is_unavailable
    assert not served.is_unavailable(11.0 + RESTART_S + SNAPSHOT_STALE_S)  # the controller is away: unknown
    for handle in served.handles:
        handle.count(READY, 20.0)
    assert not served.is_unavailable(10.1 + RESTART_S)
    view.close()


STARTING = ReplicaPhase.STARTING


@pytest.mark.parametrize(
    ("states", "down", "asleep"),
    [
        ([], True, True),
        ([ReplicaPhase.DRAINING], True, True),
        ([ReplicaPhase.DRAINING, STARTING], True, False),
        ([ReplicaPhase.READY, STARTING], False, False),
    ],
    ids=["none", "the last one drains", "one starts", "one serves"],
)
async def test_sleeping_models(states: list[ReplicaPhase], *, down: bool, asleep: bool) -> None:
    view = FleetView("", WorkerMetrics())
    view.take(in_states(states), "controller", 10.0)
    served = view.models[0]
    assert (served.down, served.asleep) == (down, asleep)
    view.take(fleet(1.0, "one", version=2), "controller", 11.0)
    assert (served.down, served.asleep) == (False, False)
    view.close()


async def test_old_replicas_give_way_while_they_drain_for_new_ones() -> None:
    view = FleetView("", WorkerMetrics())
    model = msgspec.structs.replace(MODEL, shape="pair", generation=2, target=2)

    def gives_way(old: ReplicaPhase, *new: ReplicaPhase) -> bool:
        mine = [ready_replica("old", "alpha", state=old, shape="small", generation=2)]
        mine += [
            ready_replica(f"new{i}", "alpha", state=state, shape="pair", generation=2)
            for i, state in enumerate(new)
        ]
        view.take(with_replicas(*mine, model=model), "controller", 1.0)
        return view.models[0].gives_way

    ready, drains = ReplicaPhase.READY, ReplicaPhase.DRAINING
    assert not gives_way(ready, ReplicaPhase.STARTING)
    assert gives_way(drains, ReplicaPhase.STARTING)
    assert gives_way(ReplicaPhase.ASLEEP, ready, ReplicaPhase.STARTING)
    assert not gives_way(drains, ready, ready)
    assert not gives_way(ready, ready, drains)
    view.close()


async def test_the_start_time_is_kept_when_all_replicas_are_gone() -> None:
    view = FleetView("", WorkerMetrics())
    quick = msgspec.structs.replace(fleet(1.0, "one").replicas[0], start_s=2.0)
    slow = msgspec.structs.replace(quick, id="two", start_s=5.0)
    view.take(with_replicas(quick, slow), "controller", 1.0)
    served = view.models[0]
    assert served.start_s == 5.0
    view.take(with_replicas(quick, version=2), "controller", 2.0)
    assert served.start_s == 2.0
    view.take(with_replicas(version=3), "controller", 3.0)
    assert served.start_s == 2.0
    view.close()


@pytest.mark.parametrize(
    ("over", "stalls"),
    [({}, 1), ({"begun": False}, 0), ({"held_back": True}, 0), ({"quiet_since": 8.0}, 0)],
    ids=["silent", "before its first token", "its client does not read", "events come"],
)
def test_a_stream_stalls_when_nothing_comes_while_its_engine_steps(over: dict[str, Any], stalls: int) -> None:
    one = handle()
    fields = {"begun": True, "held_back": False, "quiet_since": 4.0, "stall_from": 0.0}
    relay = Mock(**{**fields, **over})
    one.relays.add(relay)
    one.count(line(tokens=10), 5.0)
    one.count(line(tokens=20), 6.5)  # since 5.0, a second after the last event
    assert new_stalls(one) == 0
    one.count(line(tokens=20), 9.0)  # no step
    one.count(line(tokens=30), 10.0)
    assert [new_stalls(one) for _ in range(2)] == [stalls, 0]


async def test_an_unobserved_prefill_ends_at_its_predicted_time(tmp_path: Path) -> None:
    mine, others = (SharedRows(tmp_path / "rows", row) for row in range(2))
    replica = ReplicaHandle(ready_replica(), 1.0, None, mine)
    for tokens in (100, 20, 3):
        replica.begin(tokens)
    others.beat()
    assert replica.look().pending_tokens == others.others(hash_name("r"))[1] == 123
    now = time.monotonic()
    replica.expect_prefill_end(100, now - 1.0)
    ahead = replica.expect_prefill_end(20, now + 3600.0)
    assert replica.look().pending_tokens == others.others(hash_name("r"))[1] == 23
    replica.first_token(3, now)
    assert replica.look().pending_tokens == 20
    for _ in range(2):  # its request has ended before, and is over once
        replica.end_prefill(ahead)
        assert replica.look().pending_tokens == others.others(hash_name("r"))[1] == 0
    assert replica.look().in_flight == 3
    mine.close()
    others.close()


async def test_servers_of_a_model_with_shapes_are_timed_by_them_and_known_by_their_pods(view: View) -> None:
    shapes = {"big": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}}
    model = {"name": "theirs", "engine": "external", "urls": ["http://h:1"], "shapes": shapes}
    document = parse({"models": [model | {"profile": "h100-8b"}]})
    view.read_document(document)
    pod = ready_replica("vllm-x1", "theirs", shape="big", generation=4)
    theirs = Model(name="theirs", engine=EngineKind.EXTERNAL, shape="big", generation=4)
    view.take(with_replicas(pod, model=theirs), "controller", 20.0)
    assert view.layer_of("theirs", "vllm-x1") == LayerKey("theirs", "big", 4)
    assert view.layer_of("theirs", "vllm-x2") is None
    servers = [
        structs.replace(external_replica("theirs", f"http://h:{port}", adapters=(), at=0.0), shape=shape)
        for port, shape in enumerate(("big", "small", "external"), start=1)
    ]
    view.set_external("theirs", [(server, ServerAccess()) for server in servers], None)
    (served,) = (each for each in view.models if each.name == "theirs")
    timings = [handle.view.timing for handle in served.handles]
    degrees = [each.model.degree if each is not None and each.model is not None else 0 for each in timings]
    assert degrees == [2, 1, 0]
    # What stays in a mode switch is the desired layer.
    stays = structs.replace(servers[0], generation=4)
    assert (served.stays(stays), served.stays(servers[1])) == (True, False)
    assert [(each.url, each.server) for each in view.scraped()] == [("", server) for server in servers]
