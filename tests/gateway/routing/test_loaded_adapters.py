"""Where requests for an adapter may go, by reports of replicas and by results of requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import ItemsView, Set
from weakref import WeakSet, ref

import pytest

from gateway.routing.fleet_listeners import FleetListeners
from gateway.routing.loaded_adapters import FAILED_S, ReplicaAdapters
from gateway.routing.replica_handle import ReplicaHandle
from tests.gateway.fake_replica import ready_replica


class Name(str):
    """The name of an adapter, which shows whether it is still held."""

    __slots__ = ("__weakref__",)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_replicas_load_adapters_on_demand_and_external_servers_do_not() -> None:
    ours, theirs = ReplicaAdapters((), loads=True), ReplicaAdapters(("sql",), loads=False)
    assert ours.serves("sql") and ours.serves("")
    assert theirs.serves("sql") and theirs.serves("") and not theirs.serves("chat")


def test_adapters_reported_as_failed_are_not_served() -> None:
    ours = ReplicaAdapters((), loads=True)
    assert ours.update(("chat",), ("sql",))
    assert not ours.serves("sql") and ours.serves("chat") and ours.serves("new")
    assert ours.refusing == {"sql"} and ours.loaded == {"chat"}
    assert ours.update(("chat",), ())
    assert ours.serves("sql")


def test_update_reports_whether_the_lists_changed() -> None:
    ours = ReplicaAdapters((), loads=True)
    assert not ours.update((), ())
    assert ours.update(("a",), ())
    assert not ours.update(("a",), ())
    ours.forget()
    assert ours.loaded == frozenset()
    assert ours.update(("a",), ())


def test_a_failed_adapter_is_avoided_for_a_while() -> None:
    clock = Clock()
    ours = ReplicaAdapters((), loads=True, clock=clock)
    ours.failed("sql")
    ours.update(("chat",), ())
    assert not ours.serves("sql") and ours.refusing == {"sql"}
    clock.now += FAILED_S + 0.1
    assert ours.serves("sql") and ours.refusing == frozenset()


def test_old_load_failures_are_dropped() -> None:
    clock = Clock()
    ours = ReplicaAdapters((), loads=True, clock=clock)
    held: WeakSet[Name] = WeakSet()
    for i in range(1000):
        name = Name(f"adapter-{i}")
        held.add(name)
        ours.failed(name)
        clock.now += FAILED_S / 10
    assert len(held) <= 11


def test_a_replaced_process_resets_load_failures() -> None:
    clock = Clock()
    ours = ReplicaAdapters((), loads=True, clock=clock)
    ours.update((), ("chat",))
    ours.failed("sql")
    ours.forget()
    assert ours.serves("sql") and ours.serves("chat")


class Visited(OrderedDict[str, float]):
    """The failures; ``visits`` counts those that could be visited one by one."""

    visits = 0

    def items(self) -> ItemsView[str, float]:  # type: ignore[override]
        self.visits += len(self)
        return super().items()


async def test_a_failure_reports_its_adapter_alone_and_visits_no_others() -> None:
    adapters: list[Set[str]] = []
    unloadable: list[Set[str]] = []
    events = FleetListeners(
        adapters=lambda model, key, loaded, refused: adapters.append(refused),
        unloadable=lambda model, refused: unloadable.append(refused),
    )
    handle = ReplicaHandle(ready_replica(), 1.0, "secret", events=events)
    handle.adapters._failed = visited = Visited()
    for i in range(100):
        handle.cannot_load(f"adapter-{i}")
    assert adapters == unloadable == [{f"adapter-{i}"} for i in range(100)]
    assert handle.adapters._failed is visited and visited.visits == 0
    assert len(handle.adapters.refusing) == 100


def test_an_adapter_that_failed_again_is_avoided_from_then_on() -> None:
    clock, chat = Clock(), Name("chat")
    ours, held = ReplicaAdapters((), loads=True, clock=clock), ref(chat)
    ours.failed("sql")
    clock.now += FAILED_S / 2
    ours.failed(chat)
    del chat
    clock.now += FAILED_S / 4
    ours.failed("sql")
    clock.now += FAILED_S / 2
    ours.failed("code")
    assert ours.refusing == {"sql", "chat", "code"}
    clock.now += FAILED_S / 4
    ours.failed("more")
    assert ours.refusing == {"sql", "code", "more"}
    assert held() is None


@pytest.mark.parametrize("loads", [True, False])
def test_adapters_are_dropped_together_as_they_are_served_one_by_one(*, loads: bool) -> None:
    adapters = ReplicaAdapters(["a", "b"], loads=loads, clock=Clock())
    names = {"", "a", "b", "c", "d"}
    for change in (lambda: None, lambda: adapters.update(["b"], ["c"]), lambda: adapters.failed("d")):
        change()
        left = set(names)
        adapters.drop_served(left)
        assert left == {name for name in names if not adapters.serves(name)}
        assert not adapters.serves_all or not left
