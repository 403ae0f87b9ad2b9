"""Where requests for an adapter may go, by reports of replicas and by results of requests."""

from __future__ import annotations

import pytest

from gateway.routing import loaded_adapters
from gateway.routing.loaded_adapters import FAILED_S, LoadedAdapters


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(loaded_adapters, "monotonic", lambda: now[0])
    return now


def test_replicas_load_adapters_on_demand_and_external_servers_do_not() -> None:
    ours, theirs = LoadedAdapters((), loads=True), LoadedAdapters(("sql",), loads=False)
    assert ours.serves("sql") and ours.serves("")
    assert theirs.serves("sql") and theirs.serves("") and not theirs.serves("chat")


def test_adapters_reported_as_failed_are_not_served() -> None:
    ours = LoadedAdapters((), loads=True)
    assert ours.update(("chat",), ("sql",))
    assert not ours.serves("sql") and ours.serves("chat") and ours.serves("new")
    assert ours.refusing == {"sql"} and ours.loaded == {"chat"}
    assert ours.update(("chat",), ())
    assert ours.serves("sql")


def test_update_reports_whether_the_lists_changed() -> None:
    ours = LoadedAdapters((), loads=True)
    assert not ours.update((), ())
    assert ours.update(("a",), ())
    assert not ours.update(("a",), ())
    ours.forget()
    assert ours.loaded == frozenset()
    assert ours.update(("a",), ())


def test_a_failed_adapter_is_avoided_for_a_while(clock: list[float]) -> None:
    ours = LoadedAdapters((), loads=True)
    ours.failed("sql")
    ours.update(("chat",), ())
    assert not ours.serves("sql") and ours.refusing == {"sql"}
    clock[0] += FAILED_S + 0.1
    assert ours.serves("sql") and ours.refusing == frozenset()


def test_old_load_failures_are_dropped(clock: list[float]) -> None:
    ours = LoadedAdapters((), loads=True)
    for i in range(1000):
        ours.failed(f"adapter-{i}")
        clock[0] += FAILED_S / 10
    assert len(ours._failed) <= 11


def test_a_replaced_process_resets_load_failures(clock: list[float]) -> None:
    ours = LoadedAdapters((), loads=True)
    ours.update((), ("chat",))
    ours.failed("sql")
    ours.forget()
    assert ours.serves("sql") and ours.serves("chat")
