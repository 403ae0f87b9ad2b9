"""The library over a store in memory: ordered adds, a durable catalog, and refused requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.errors import AdapterRefused, AdapterUnknown, ConfigError, TargetError
from policy.stats.backoff import Backoff
from policy.wire.adapter_catalog import Alias, CatalogSnapshot
from policy.wire.controller import AddAdapterRequest
from serve.adapters.adapter_registry import ADDS_AT_ONCE, AdapterRegistry
from serve.adapters.add_job_state import AddAdapterJob
from store.progress_report import ProgressLine
from tests.serve.fake_adapter_store import FakeAdapterStore, new_version
from tests.serve.sim_documents import deployment, sim_model

SQL = ("m", "sql")
TENANTS = [{"name": "acme", "keys_sha256": ["a" * 64]}]


def adapted(*names: str, **over: Any) -> list[dict[str, Any]]:
    return [sim_model(name, adapters={}, **over) for name in names or ("m",)]


@pytest.fixture
def store(tmp_path: Path) -> FakeAdapterStore:
    return FakeAdapterStore(tmp_path)


@pytest.fixture
async def library(store: FakeAdapterStore) -> AsyncIterator[AdapterRegistry]:
    made = AdapterRegistry(lambda: store, 5.0, lambda text: None)
    made.declare(deployment(*adapted(), tenants=TENANTS))
    await made.open()
    yield made
    store.gate.set()
    for adding in tuple(made.jobs):
        await adding.done.wait()


async def ended(adding: AddAdapterJob) -> AddAdapterJob:
    await asyncio.wait_for(adding.done.wait(), 60)
    return adding


async def added(library: AdapterRegistry, name: str = "sql", source: str = "/a", **over: Any) -> Alias:
    adding = await ended(library.add(AddAdapterRequest(name=name, source=source, **over)))
    assert adding.line.alias is not None, adding.line
    return adding.line.alias


async def catalog(library: AdapterRegistry) -> CatalogSnapshot:
    _, line = await library.line()
    return msgspec.json.decode(line, type=CatalogSnapshot)


async def test_imports_of_one_name_run_in_sequence(library: AdapterRegistry, store: FakeAdapterStore) -> None:
    store.gate.clear()
    first = library.add(AddAdapterRequest(name="sql", source="/a"))
    second = library.add(AddAdapterRequest(name="sql", source="/b"))
    other = library.add(AddAdapterRequest(name="law", source="/c"))
    while len(store.imported) < 2:  # noqa: ASYNC110 - the threads have no event
        await asyncio.sleep(0.001)
    assert sorted(store.imported) == ["/a", "/c"]
    assert second.line.message == "waiting for other imports"
    assert (first.line.done, first.line.total, first.line.step) == (50, 100, "fetch")
    store.gate.set()
    await asyncio.gather(ended(first), ended(second), ended(other))
    assert store.imported[2] == "/b"
    assert store.records[SQL].split == ((2, 1.0),)
    assert not library.jobs


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (AdapterRefused("dora", "use_dora is set"), ("AdapterRefused", "dora", "use_dora is set")),
        (OSError(28, "No space left"), ("TidegateError", "", "OSError: [Errno 28] No space left")),
        (None, ("TidegateError", "", "the database does not answer")),
    ],
)
async def test_failed_import_changes_nothing(
    library: AdapterRegistry,
    store: FakeAdapterStore,
    failure: Exception | None,
    expected: tuple[str, str, str],
) -> None:
    alias = await added(library)
    if failure is None:
        store.down = expected[2]
    else:
        store.contents["/bad"] = failure
    error = (await ended(library.add(AddAdapterRequest(name="sql", source="/bad")))).line.error
    assert error is not None
    assert (error.type, error.code, error.message) == expected
    assert (await catalog(library)).aliases == (alias,)


@pytest.mark.parametrize(
    ("request_", "kind", "says"),
    [
        ({"name": "../etc"}, AdapterRefused, r"name: got '../etc', expected a name that matches"),
        ({"name": "m"}, AdapterRefused, "name: got 'm', expected a name that no model has"),
        ({"source": ""}, ConfigError, "source: got ''"),
        ({"model": "x"}, TargetError, "model: got 'x', expected one that takes adapters: m"),
        ({"tenants": ("bits",)}, ConfigError, "tenants: got 'bits', expected one of .*: acme"),
    ],
)
async def test_invalid_requests_are_refused_at_once(
    library: AdapterRegistry, request_: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        library.add(AddAdapterRequest(**{"name": "sql", "source": "/a"} | request_))
    assert not library.jobs


async def test_a_model_must_be_named_unless_exactly_one_takes_adapters(store: FakeAdapterStore) -> None:
    library = AdapterRegistry(lambda: store, 5.0, lambda text: None)
    library.declare(deployment(sim_model()))
    with pytest.raises(TargetError, match="no model takes adapters"):
        library.add(AddAdapterRequest(name="sql", source="/a"))
    assert (await catalog(library)).aliases == ()
    library.declare(deployment(*adapted("m", "n")))
    with pytest.raises(TargetError, match="model: got none, expected one of m, n"):
        library.add(AddAdapterRequest(name="sql", source="/a"))


async def test_a_rollback_names_a_version(library: AdapterRegistry) -> None:
    await added(library)
    with pytest.raises(ConfigError, match="to: got '1', expected a version such as v1"):
        await library.rollback(SQL, "1")
    await added(library, source="/b", weight=0)
    assert (await library.rollback(SQL, "v2")).split == ((2, 1.0),)


@pytest.mark.parametrize(
    "weights", [{"1": 1.0}, {"v0": 1.0}, {"v1": -1.0}, {"v1": float("inf")}, {"v1": 0.0}, {}]
)
async def test_invalid_weights_are_refused(library: AdapterRegistry, weights: dict[str, float]) -> None:
    await added(library)
    with pytest.raises(ConfigError, match="split: got"):
        await library.split(SQL, weights)


async def test_the_catalog_waits_for_records(
    store: FakeAdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.adapters.adapter_registry.RETRY", Backoff(0.001))
    alias = store.put(SQL, [new_version("/a", "/a")], None, declared=False)
    store.down = "away"
    events: list[str] = []
    library = AdapterRegistry(lambda: store, 5.0, events.append)
    library.declare(deployment(*adapted()))
    opening = asyncio.create_task(library.open())
    line = asyncio.create_task(library.line())
    while len(events) < 2:  # noqa: ASYNC110 - the events of a library are texts
        await asyncio.sleep(0.001)
    assert not line.done()
    store.down = ""
    await opening
    assert msgspec.json.decode((await line)[1], type=CatalogSnapshot).aliases == (alias,)


async def test_names_of_a_removed_model_are_hidden(library: AdapterRegistry) -> None:
    alias = await added(library)
    library.declare(deployment(sim_model()))
    assert (await catalog(library)).aliases == ()
    library.declare(deployment(*adapted()))
    assert (await catalog(library)).aliases == (alias,)


async def test_no_file_is_deleted_during_an_import(library: AdapterRegistry, store: FakeAdapterStore) -> None:
    store.gate.clear()
    adding = library.add(AddAdapterRequest(name="sql", source="/a"))
    await library.clear({"law@0123"})
    assert store.cleared == []
    store.gate.set()
    await ended(adding)
    await asyncio.sleep(0)
    await library.clear({"law@0123"})
    assert store.cleared == [{"law@0123"}]


async def test_slow_servers_delay_no_local_import(library: AdapterRegistry, store: FakeAdapterStore) -> None:
    store.gate.clear()
    slow = [
        library.add(AddAdapterRequest(name=f"a{i}", source=f"https://h/{i}")) for i in range(ADDS_AT_ONCE + 1)
    ]
    while len(store.imported) < ADDS_AT_ONCE:  # noqa: ASYNC110 - the threads have no event
        await asyncio.sleep(0.001)
    library.add(AddAdapterRequest(name="sql", source="/a"))
    library.add(AddAdapterRequest(name="law", source="file:///b"))
    while len(store.imported) < ADDS_AT_ONCE + 2:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0.001)
    assert set(store.imported[ADDS_AT_ONCE:]) == {"/a", "file:///b"}
    assert library.fetching() == {
        **{("m", f"a{i}"): f"https://h/{i}" for i in range(ADDS_AT_ONCE)},
        ("m", f"a{ADDS_AT_ONCE}"): "waiting for other imports",
        ("m", "sql"): "/a",
        ("m", "law"): "file:///b",
    }
    store.gate.set()
    await asyncio.gather(*map(ended, slow))


async def test_pending_import_can_be_removed(library: AdapterRegistry, store: FakeAdapterStore) -> None:
    store.gate.clear()
    adding = library.add(AddAdapterRequest(name="sql", source="https://h/a"))
    while not store.imported:  # noqa: ASYNC110 - the thread has no event
        await asyncio.sleep(0.001)
    await library.remove(SQL)
    # The waiting caller gets the error while the thread still runs.
    assert isinstance(adding.error, TargetError)
    assert library.fetching() == {}
    with pytest.raises(TargetError, match="removed"):
        adding.report(ProgressLine(step="fetch", message="", fraction=0.6))
    with pytest.raises(AdapterUnknown):
        await library.remove(SQL)
    again = library.add(AddAdapterRequest(name="sql", source="/b"))
    store.gate.set()
    assert (await ended(again)).line.alias is not None
    assert adding.line.error is not None
    assert store.records[SQL].versions[0].source == "/b"


@pytest.mark.timeout(60)
async def test_a_job_does_not_wait_for_the_thread_of_a_removed_one(
    library: AdapterRegistry, store: FakeAdapterStore
) -> None:
    store.gate.clear()
    library.add(AddAdapterRequest(name="sql", source="https://h/silent"))
    while not store.imported:  # noqa: ASYNC110 - the thread has no event
        await asyncio.sleep(0.001)
    await library.remove(SQL)
    again = library.add(AddAdapterRequest(name="sql", source="https://h/a"))
    while len(store.imported) < 2:  # noqa: ASYNC110 - likewise
        await asyncio.sleep(0.001)
    assert store.imported == ["https://h/silent", "https://h/a"]
    store.gate.set()
    assert (await ended(again)).line.alias is not None
    assert [version.source for version in store.records[SQL].versions] == ["https://h/a"]
