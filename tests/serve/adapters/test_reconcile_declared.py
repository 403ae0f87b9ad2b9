"""Declared adapters are added, changed and removed; changes by users are kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from policy.errors import AdapterRefused, AdapterUnknown
from policy.wire.adapter_catalog import Alias
from policy.wire.controller import AddAdapterRequest
from serve.adapters.adapter_registry import AdapterRegistry
from serve.adapters.reconcile_declared import LOOK_S, RETRY, DeclaredAdapterReconciler
from store.state_dir import StateDir
from tests.serve.fake_adapter_store import FakeAdapterStore, digest_of, unreachable
from tests.serve.sim_documents import deployment, sim_model

SQL, LAW = ("m", "sql"), ("m", "law")


@dataclass
class Reconciler:
    """A library and its declared adapters; ``restart`` makes another controller over the same records."""

    state: StateDir
    store: FakeAdapterStore = field(init=False)
    now: float = 0.0
    library: AdapterRegistry = field(init=False)
    declaring: DeclaredAdapterReconciler = field(init=False)

    def __post_init__(self) -> None:
        self.store = FakeAdapterStore(self.state.root)

    async def restart(self, *sources: dict[str, Any]) -> Reconciler:
        self.library = AdapterRegistry(lambda: self.store, 5.0, lambda text: None)
        self.declaring = DeclaredAdapterReconciler(self.library, self.state, lambda: self.now)
        self.declare(sources, applied=False)
        await self.library.open()
        return await self.settle()

    async def apply(self, *sources: dict[str, Any]) -> Reconciler:
        self.declare(sources, applied=True)
        return await self.settle()

    def declare(self, sources: tuple[dict[str, Any], ...], *, applied: bool) -> None:
        tenants = [{"name": "acme", "keys_sha256": ["a" * 64]}]
        document = deployment(sim_model(adapters={"sources": list(sources)}), tenants=tenants)
        self.library.declare(document)
        self.declaring.declare(document, applied=applied)

    async def settle(self) -> Reconciler:
        await self.declaring.step()
        while adding := next(iter(self.library.jobs), None):
            await adding.done.wait()
            await asyncio.sleep(0)  # the library is closed then
            await self.declaring.step()
        return self

    def alias(self, key: tuple[str, str] = SQL) -> Alias:
        alias = self.library.catalog.get(key)
        assert alias is not None
        return alias

    def shares(self, key: tuple[str, str] = SQL) -> dict[str, float]:
        alias = self.alias(key)
        sources = {version.number: version.source for version in alias.versions}
        return {sources[number]: weight for number, weight in alias.split}


@pytest.fixture
def reconciler(tmp_path: Path) -> Reconciler:
    return Reconciler(StateDir(tmp_path).ensure())


def source(name: str = "sql", at: str = "hf:org/a", **over: Any) -> dict[str, Any]:
    return {"name": name, "source": at, **over}


async def test_declared_adapters_are_reconciled(reconciler: Reconciler) -> None:
    await reconciler.restart(source(), source("law", "hf:org/law"))
    assert (reconciler.shares(), reconciler.shares(LAW)) == ({"hf:org/a": 1.0}, {"hf:org/law": 1.0})
    await reconciler.apply(source(at="hf:org/b"))
    assert reconciler.shares() == {"hf:org/b": 1.0}
    assert reconciler.library.catalog.get(LAW) is None
    await reconciler.apply()
    assert reconciler.store.records == {}


async def test_stored_sources_are_not_fetched_again(reconciler: Reconciler) -> None:
    await reconciler.restart(source(), source("law", "hf:org/law"))
    await reconciler.restart(source(), source("law", "hf:org/law"))
    await reconciler.apply(source(), source("law", "hf:org/law", tenants=["acme"]))
    assert sorted(reconciler.store.imported) == ["hf:org/a", "hf:org/law"]
    assert reconciler.alias(LAW).tenants == ("acme",)


async def test_missing_files_are_fetched_again(reconciler: Reconciler) -> None:
    await reconciler.restart(source())
    reconciler.store.digests.clear()
    await reconciler.apply(source())
    assert reconciler.store.imported == ["hf:org/a", "hf:org/a"]


@pytest.mark.parametrize("by", ["restart", "time"])
async def test_missing_files_are_fetched_again_without_an_apply(reconciler: Reconciler, by: str) -> None:
    """A controller that takes over on another host has the records alone; replicas got no files from it."""
    await reconciler.restart(source(), source("law", "hf:org/law"))
    split = reconciler.alias().split
    reconciler.store.digests.remove(digest_of("hf:org/a"))
    if by == "restart":
        await reconciler.restart(source(), source("law", "hf:org/law"))
    else:
        reconciler.now += LOOK_S - 1
        await reconciler.settle()
        assert reconciler.store.imported == ["hf:org/a", "hf:org/law"]
        reconciler.now += 1
        await reconciler.settle()
    assert reconciler.store.imported == ["hf:org/a", "hf:org/law", "hf:org/a"]
    assert reconciler.alias().split == split
    reconciler.now += LOOK_S
    await reconciler.settle()
    assert len(reconciler.store.imported) == 3


async def test_missing_files_of_an_unreachable_source_are_tried_again(reconciler: Reconciler) -> None:
    await reconciler.restart(source())
    reconciler.store.digests.clear()
    reconciler.store.contents["hf:org/a"] = unreachable("no route")
    await reconciler.restart(source())
    assert reconciler.declaring.troubles[SQL].reason == "no route"
    assert reconciler.shares() == {"hf:org/a": 1.0}
    reconciler.store.contents.clear()
    reconciler.now += RETRY.first_s
    await reconciler.settle()
    assert reconciler.declaring.troubles == {}
    assert reconciler.store.digests == {digest_of("hf:org/a")}


async def test_missing_files_of_a_version_without_requests_are_not_fetched(reconciler: Reconciler) -> None:
    """The declared source may have newer content by now, which users did not choose."""
    await reconciler.restart(source())
    await reconciler.library.add(AddAdapterRequest(name="sql", source="hf:org/mine")).done.wait()
    reconciler.store.digests.remove(digest_of("hf:org/a"))
    reconciler.now += LOOK_S
    await reconciler.settle()
    assert reconciler.store.imported == ["hf:org/a", "hf:org/mine"]


@pytest.mark.parametrize("by", ["apply", "restart"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("https://h/get?id=1", "https://h/get?id=2"),
        ("s3://b/sql?versionId=1", "s3://b/sql"),
        ("https://a:b@h/get", "https://c:d@h/get"),
    ],
)
async def test_sources_that_differ_in_hidden_parts_are_different(
    reconciler: Reconciler, old: str, new: str, by: str
) -> None:
    """The second was taken for the first: nothing was fetched, and the old files were served."""
    await reconciler.restart(source(at=old))
    await (reconciler.apply(source(at=new)) if by == "apply" else reconciler.restart(source(at=new)))
    assert reconciler.store.imported == [old, new]
    assert reconciler.alias().split == ((2, 1.0),)
    await reconciler.apply(source(at=old))
    assert reconciler.store.imported == [old, new]
    assert reconciler.alias().split == ((1, 1.0),)


async def test_a_restart_keeps_the_split_of_sources_that_differ_in_hidden_parts(
    reconciler: Reconciler,
) -> None:
    """All requests got the second."""
    at = "https://h/get?id="
    versions = {"a": {"source": f"{at}1", "weight": 95}, "b": {"source": f"{at}2", "weight": 5}}
    entry = {"name": "sql", "versions": versions}
    await reconciler.restart(entry)
    for _ in range(2):
        await reconciler.restart(entry)
        assert reconciler.alias().split == ((1, 95.0), (2, 5.0))
    assert reconciler.store.imported == [f"{at}1", f"{at}2"]


async def test_changed_weights_fetch_nothing(reconciler: Reconciler) -> None:
    versions = {"v1": {"source": "hf:org/a", "weight": 95}, "v2": {"source": "hf:org/b", "weight": 5}}
    await reconciler.restart({"name": "sql", "versions": versions})
    assert reconciler.shares() == {"hf:org/a": 95.0, "hf:org/b": 5.0}
    assert reconciler.alias().revision == 1
    versions["v2"]["weight"] = 50
    await reconciler.apply({"name": "sql", "versions": versions})
    assert reconciler.shares() == {"hf:org/a": 95.0, "hf:org/b": 50.0}
    assert reconciler.store.imported == ["hf:org/a", "hf:org/b"]


async def test_changed_folder_is_imported_again_by_an_apply(reconciler: Reconciler, tmp_path: Path) -> None:
    folder = tmp_path / "sql"
    folder.mkdir()
    file = folder / "adapter_model.safetensors"
    file.write_text("one")
    entry = {"name": "sql", "path": str(folder)}
    await reconciler.restart(entry)
    await reconciler.apply(entry)
    assert reconciler.store.imported == [str(folder)]
    os.utime(file, ns=(1, 1))
    reconciler.store.contents[str(folder)] = "two"
    await reconciler.settle()
    assert reconciler.store.imported == [str(folder)]
    await reconciler.apply(entry)
    assert reconciler.alias().split == ((2, 1.0),)
    assert reconciler.alias().versions[1].digest == digest_of("two")
    # Another controller has not seen the folder before.
    await reconciler.restart(entry)
    await reconciler.apply(entry)
    assert reconciler.store.imported == [str(folder)] * 3
    assert reconciler.alias().split == ((2, 1.0),)


async def changed_folder(reconciler: Reconciler, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A declared folder whose files have changed since its import, and its entry."""
    folder = tmp_path / "sql"
    folder.mkdir()
    entry = {"name": "sql", "path": str(folder)}
    await reconciler.restart(entry)
    (folder / "adapter_model.safetensors").write_text("two")
    return folder, entry


async def test_changed_folder_whose_import_fails_is_imported_again(
    reconciler: Reconciler, tmp_path: Path
) -> None:
    """The retry took the stored version of the old files for the new one, for ever."""
    folder, entry = await changed_folder(reconciler, tmp_path)
    reconciler.store.contents[str(folder)] = OSError("disk full")
    await reconciler.apply(entry)
    assert SQL in reconciler.declaring.troubles
    reconciler.store.contents[str(folder)] = "two"
    await reconciler.settle()
    assert reconciler.store.imported == [str(folder)] * 2, "not before the back-off has passed"
    reconciler.now += RETRY.first_s
    await reconciler.settle()
    assert reconciler.declaring.troubles == {}
    assert reconciler.alias().split == ((2, 1.0),)
    await reconciler.apply(entry)
    assert reconciler.store.imported == [str(folder)] * 3


async def test_folder_that_changes_during_its_import_is_imported_again_by_an_apply(
    reconciler: Reconciler, tmp_path: Path
) -> None:
    folder, entry = await changed_folder(reconciler, tmp_path)
    reconciler.store.contents[str(folder)] = "two"
    reconciler.store.gate.clear()
    reconciler.declare((entry,), applied=True)
    await reconciler.declaring.step()
    (folder / "adapter_config.json").write_text("three")
    reconciler.declare((entry,), applied=True)
    reconciler.store.gate.set()
    await reconciler.settle()
    assert reconciler.store.imported == [str(folder)] * 3


async def test_a_name_removed_as_its_files_are_looked_at_is_not_added(reconciler: Reconciler) -> None:
    await reconciler.restart()
    reconciler.declare((source(),), applied=True)
    step = asyncio.create_task(reconciler.declaring.step())
    await asyncio.sleep(0)  # its thread looks at the files, and answers over the event loop
    await reconciler.declaring.remove(SQL)
    await step
    await reconciler.settle()
    assert reconciler.store.imported == []


async def test_unreachable_source_is_retried_with_backoff(reconciler: Reconciler) -> None:
    reconciler.store.contents["hf:org/a"] = unreachable("no route")
    await reconciler.restart(source(), source("law", "hf:org/law"))
    assert reconciler.alias(LAW)
    failure = reconciler.declaring.troubles[SQL]
    assert (failure.reason, failure.refused, failure.attempts) == ("no route", False, 1)
    reconciler.now += RETRY.first_s - 0.1
    await reconciler.settle()
    assert reconciler.store.imported.count("hf:org/a") == 1
    reconciler.now += 0.1
    await reconciler.settle()
    assert reconciler.store.imported.count("hf:org/a") == 2
    reconciler.now += RETRY.first_s
    await reconciler.settle()
    assert reconciler.store.imported.count("hf:org/a") == 2
    reconciler.store.contents.clear()
    reconciler.now += RETRY.first_s
    await reconciler.settle()
    assert reconciler.shares() == {"hf:org/a": 1.0}
    assert reconciler.declaring.troubles == {}


async def test_apply_retries_at_once(reconciler: Reconciler) -> None:
    reconciler.store.contents["hf:org/a"] = AdapterRefused("dora", "use_dora is set")
    await reconciler.restart(source())
    assert reconciler.declaring.troubles[SQL].refused
    reconciler.store.contents.clear()
    await reconciler.apply(source())
    assert reconciler.shares() == {"hf:org/a": 1.0}


async def test_an_apply_imports_adapters_again_that_do_not_fit_the_base_model(reconciler: Reconciler) -> None:
    await reconciler.restart(source(), source("law", "hf:org/law"))
    reconciler.library.unfit["m"] = {digest_of("hf:org/a"): "made for another"}
    reconciler.store.contents["hf:org/a"] = AdapterRefused("base_model", "made for another")
    await reconciler.apply(source(), source("law", "hf:org/law"))
    assert reconciler.store.imported == ["hf:org/a", "hf:org/law", "hf:org/a"]
    assert reconciler.declaring.troubles[SQL].refused
    reconciler.store.contents.clear()
    await reconciler.apply(source(force=True), source("law", "hf:org/law"))
    assert reconciler.declaring.troubles == {}
    assert reconciler.library.unfit["m"] == {}
    assert reconciler.alias().split == ((1, 1.0),)


async def test_changes_by_users_are_kept_until_the_declaration_changes(reconciler: Reconciler) -> None:
    await reconciler.restart(source())
    adding = reconciler.library.add(AddAdapterRequest(name="sql", source="hf:org/mine"))
    await adding.done.wait()
    await reconciler.settle()
    await reconciler.apply(source())
    # The declaration is compared with the records: nothing is new.
    assert "hf:org/a" in {version.source for version in reconciler.alias().versions}
    await reconciler.apply(source(at="hf:org/b"))
    assert reconciler.shares() == {"hf:org/b": 1.0}


@pytest.mark.parametrize("then", ["canary", "rollback"])
@pytest.mark.parametrize("by", ["restart", "apply"])
async def test_newer_content_of_a_declared_source_stays_as_users_split_it(
    reconciler: Reconciler, then: str, by: str
) -> None:
    """A restart of the controller, or an apply of something else, gave all requests to it."""
    await reconciler.restart(source())
    reconciler.store.contents["hf:org/a"] = "newer"
    weight = 5.0 if then == "canary" else None
    await reconciler.library.add(AddAdapterRequest(name="sql", source="hf:org/a", weight=weight)).done.wait()
    if then == "rollback":
        await reconciler.library.rollback(SQL)
    split = reconciler.alias().split
    assert split == (((1, 95.0), (2, 5.0)) if then == "canary" else ((1, 1.0),))
    await (reconciler.restart(source()) if by == "restart" else reconciler.apply(source()))
    assert reconciler.alias().split == split


@pytest.mark.parametrize("returns_by", ["apply", "first start"])
async def test_a_removed_name_is_not_added_again(reconciler: Reconciler, returns_by: str) -> None:
    await reconciler.restart(source())
    await reconciler.declaring.remove(SQL)
    await reconciler.settle()
    await reconciler.restart(source())
    assert reconciler.library.catalog.get(SQL) is None
    if returns_by == "apply":
        await reconciler.apply(source())
    else:
        reconciler.state.removed_path.unlink()
        await reconciler.restart(source())
    assert reconciler.shares() == {"hf:org/a": 1.0}
    with pytest.raises(AdapterUnknown):
        await reconciler.declaring.remove(LAW)


async def test_first_start_checks_folders_again(reconciler: Reconciler, tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    entry = {"name": "sql", "path": str(tmp_path / "sql")}
    for start, times in ((True, 1), (False, 1), (True, 2)):
        if start:
            reconciler.state.removed_path.unlink(missing_ok=True)
        await reconciler.restart(entry)
        assert len(reconciler.store.imported) == times


async def test_a_name_removed_during_its_import_is_not_added_again(reconciler: Reconciler) -> None:
    await reconciler.restart(source())
    reconciler.store.gate.clear()
    reconciler.declare((source(at="hf:org/b"),), applied=True)
    await reconciler.declaring.step()
    await reconciler.declaring.remove(SQL)
    reconciler.store.gate.set()
    await reconciler.settle()
    await reconciler.settle()
    assert reconciler.library.catalog.get(SQL) is None
    assert reconciler.declaring.troubles == {}


async def test_removed_name_may_be_used_by_the_api(reconciler: Reconciler) -> None:
    await reconciler.restart(source())
    await reconciler.declaring.remove(SQL)
    await reconciler.library.add(AddAdapterRequest(name="sql", source="hf:org/mine")).done.wait()
    await reconciler.settle()
    await reconciler.restart(source())
    assert reconciler.shares() == {"hf:org/mine": 1.0}
    await reconciler.apply(source())
    assert reconciler.shares() == {"hf:org/a": 1.0}


async def test_names_added_over_the_api_are_kept(reconciler: Reconciler) -> None:
    await reconciler.restart(source())
    await reconciler.library.add(AddAdapterRequest(name="law", source="hf:org/law")).done.wait()
    await reconciler.apply()
    assert reconciler.library.catalog.get(SQL) is None
    assert reconciler.shares(LAW) == {"hf:org/law": 1.0}


async def test_a_name_undeclared_while_no_controller_ran_is_removed(reconciler: Reconciler) -> None:
    await reconciler.restart(source(), source("law", "hf:org/law"))
    await reconciler.restart(source())
    assert reconciler.library.catalog.get(LAW) is None
    assert reconciler.shares() == {"hf:org/a": 1.0}


async def test_the_last_source_is_served_if_it_changes_during_an_import(reconciler: Reconciler) -> None:
    reconciler.store.gate.clear()
    reconciler.library = AdapterRegistry(lambda: reconciler.store, 5.0, lambda text: None)
    reconciler.declaring = DeclaredAdapterReconciler(
        reconciler.library, reconciler.state, lambda: reconciler.now
    )
    reconciler.declare((source(),), applied=False)
    await reconciler.library.open()
    await reconciler.declaring.step()
    assert reconciler.library.fetching() == {SQL: "waiting for other imports"}
    reconciler.declare((source(at="hf:org/b"),), applied=True)
    reconciler.store.gate.set()
    await reconciler.settle()
    await reconciler.settle()
    assert reconciler.shares() == {"hf:org/b": 1.0}


async def test_missing_declared_name_can_be_removed(reconciler: Reconciler) -> None:
    reconciler.store.contents["hf:org/a"] = unreachable("no route")
    await reconciler.restart(source())
    await reconciler.declaring.remove(SQL)
    assert reconciler.declaring.troubles == {}
    reconciler.now += 10 * RETRY.first_s
    await reconciler.settle()
    assert reconciler.store.imported == ["hf:org/a"]
    with pytest.raises(AdapterUnknown):
        await reconciler.declaring.remove(SQL)


@contextlib.contextmanager
def unwritable(path: Path) -> Iterator[None]:
    """A file that cannot be written, as on a full disk: a folder is in its place."""
    path.unlink(missing_ok=True)
    path.mkdir()
    yield
    path.rmdir()


async def test_a_removal_that_could_not_be_stored_is_stored_by_the_next(reconciler: Reconciler) -> None:
    """It was taken for stored: after a restart of the controller the name was served again."""
    removed = reconciler.state.removed_path
    await reconciler.restart(source())
    with unwritable(removed), pytest.raises(IsADirectoryError):
        await reconciler.declaring.remove(SQL)
    await reconciler.declaring.remove(SQL)
    stored = removed.read_bytes()
    await reconciler.restart(source())
    assert reconciler.library.catalog.get(SQL) is None
    with unwritable(removed), pytest.raises(IsADirectoryError):
        await reconciler.apply(source())
    removed.write_bytes(stored)
    await reconciler.apply(source())
    await reconciler.restart(source())
    assert reconciler.shares() == {"hf:org/a": 1.0}
