"""What a document declares is brought about, changed and taken away; what people do meanwhile stays."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from policy.errors import AdapterRefused, AdapterUnknown
from policy.wire.adapter_catalog import Alias
from policy.wire.controller import AddRequest
from serve.adapters.library import AdapterLibrary
from serve.adapters.reconcile_declared import RETRY, DeclaredAdapters
from store.state_dir import StateDir
from tests.serve.fake_adapter_store import FakeAdapterStore, digest_of, unreachable
from tests.serve.sim_documents import deployment, sim_model

SQL, LAW = ("m", "sql"), ("m", "law")


@dataclass
class Desk:
    """A library, and what declares to it; ``restart`` is another controller over the same records."""

    state: StateDir
    store: FakeAdapterStore = field(init=False)
    now: float = 0.0
    library: AdapterLibrary = field(init=False)
    declaring: DeclaredAdapters = field(init=False)

    def __post_init__(self) -> None:
        self.store = FakeAdapterStore(self.state.root)

    async def restart(self, *sources: dict[str, Any]) -> Desk:
        self.library = AdapterLibrary(lambda: self.store, 5.0, lambda text: None)
        self.declaring = DeclaredAdapters(self.library, self.state, lambda: self.now)
        self._declare(sources, applied=False)
        await self.library.open()
        return await self.settle()

    async def apply(self, *sources: dict[str, Any]) -> Desk:
        self._declare(sources, applied=True)
        return await self.settle()

    def _declare(self, sources: tuple[dict[str, Any], ...], *, applied: bool) -> None:
        tenants = [{"name": "acme", "keys_sha256": ["a" * 64]}]
        document = deployment(sim_model(adapters={"sources": list(sources)}), tenants=tenants)
        self.library.declare(document)
        self.declaring.declare(document, applied=applied)

    async def settle(self) -> Desk:
        await self.declaring.step()
        while adding := next(iter(self.library.jobs), None):
            await adding.done.wait()
            await asyncio.sleep(0)  # it leaves the library then
            await self.declaring.step()
        return self

    def alias(self, key: tuple[str, str] = SQL) -> Alias:
        alias = self.library.catalog.get(key)
        assert alias is not None
        return alias

    def stands_for(self, key: tuple[str, str] = SQL) -> dict[str, float]:
        alias = self.alias(key)
        sources = {version.number: version.source for version in alias.versions}
        return {sources[number]: weight for number, weight in alias.split}


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(StateDir(tmp_path).ensure())


def source(name: str = "sql", at: str = "hf:org/a", **over: Any) -> dict[str, Any]:
    return {"name": name, "source": at, **over}


async def test_declared_adapters_are_reconciled(desk: Desk) -> None:
    await desk.restart(source(), source("law", "hf:org/law"))
    assert (desk.stands_for(), desk.stands_for(LAW)) == ({"hf:org/a": 1.0}, {"hf:org/law": 1.0})
    await desk.apply(source(at="hf:org/b"))
    assert desk.stands_for() == {"hf:org/b": 1.0}
    assert desk.library.catalog.get(LAW) is None
    await desk.apply()
    assert desk.store.records == {}


async def test_stored_sources_are_not_fetched_again(desk: Desk) -> None:
    await desk.restart(source(), source("law", "hf:org/law"))
    await desk.restart(source(), source("law", "hf:org/law"))
    await desk.apply(source(), source("law", "hf:org/law", tenants=["acme"]))
    assert desk.store.imported == ["hf:org/a", "hf:org/law"]
    assert desk.alias(LAW).tenants == ("acme",)


async def test_missing_files_are_fetched_again(desk: Desk) -> None:
    await desk.restart(source())
    desk.store.digests.clear()
    await desk.apply(source())
    assert desk.store.imported == ["hf:org/a", "hf:org/a"]


async def test_changed_weights_fetch_nothing(desk: Desk) -> None:
    versions = {"v1": {"source": "hf:org/a", "weight": 95}, "v2": {"source": "hf:org/b", "weight": 5}}
    await desk.restart({"name": "sql", "versions": versions})
    assert desk.stands_for() == {"hf:org/a": 95.0, "hf:org/b": 5.0}
    assert desk.alias().revision == 1
    versions["v2"]["weight"] = 50
    await desk.apply({"name": "sql", "versions": versions})
    assert desk.stands_for() == {"hf:org/a": 95.0, "hf:org/b": 50.0}
    assert desk.store.imported == ["hf:org/a", "hf:org/b"]


async def test_changed_folder_is_imported_again_by_an_apply(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "sql"
    folder.mkdir()
    file = folder / "adapter_model.safetensors"
    file.write_text("one")
    entry = {"name": "sql", "path": str(folder)}
    await desk.restart(entry)
    await desk.apply(entry)
    assert desk.store.imported == [str(folder)]
    os.utime(file, ns=(1, 1))
    desk.store.contents[str(folder)] = "two"
    await desk.settle()
    assert desk.store.imported == [str(folder)]
    await desk.apply(entry)
    assert desk.alias().split == ((2, 1.0),)
    assert desk.alias().versions[1].digest == digest_of("two")
    # Another controller has not seen the folder before.
    await desk.restart(entry)
    await desk.apply(entry)
    assert desk.store.imported == [str(folder)] * 3
    assert desk.alias().split == ((2, 1.0),)


async def test_unreachable_source_is_retried_with_backoff(desk: Desk) -> None:
    desk.store.contents["hf:org/a"] = unreachable("no route")
    await desk.restart(source(), source("law", "hf:org/law"))
    assert desk.alias(LAW)
    trouble = desk.declaring.troubles[SQL]
    assert (trouble.reason, trouble.refused, trouble.attempts) == ("no route", False, 1)
    desk.now += RETRY.first_s - 0.1
    await desk.settle()
    assert desk.store.imported.count("hf:org/a") == 1
    desk.now += 0.1
    await desk.settle()
    assert desk.store.imported.count("hf:org/a") == 2
    desk.now += RETRY.first_s
    await desk.settle()
    assert desk.store.imported.count("hf:org/a") == 2
    desk.store.contents.clear()
    desk.now += RETRY.first_s
    await desk.settle()
    assert desk.stands_for() == {"hf:org/a": 1.0}
    assert desk.declaring.troubles == {}


async def test_apply_retries_at_once(desk: Desk) -> None:
    desk.store.contents["hf:org/a"] = AdapterRefused("dora", "use_dora is set")
    await desk.restart(source())
    assert desk.declaring.troubles[SQL].refused
    desk.store.contents.clear()
    await desk.apply(source())
    assert desk.stands_for() == {"hf:org/a": 1.0}


async def test_user_changes_stay_until_the_declaration_changes(desk: Desk) -> None:
    await desk.restart(source())
    adding = desk.library.add(AddRequest(name="sql", source="hf:org/mine"))
    await adding.done.wait()
    await desk.settle()
    await desk.apply(source())
    # It may ask what the document brought; the records say that this is nothing new.
    assert "hf:org/a" in {version.source for version in desk.alias().versions}
    await desk.apply(source(at="hf:org/b"))
    assert desk.stands_for() == {"hf:org/b": 1.0}


@pytest.mark.parametrize("returns_by", ["apply", "first start"])
async def test_removed_name_stays_removed(desk: Desk, returns_by: str) -> None:
    await desk.restart(source())
    await desk.declaring.remove(SQL)
    await desk.settle()
    await desk.restart(source())
    assert desk.library.catalog.get(SQL) is None
    if returns_by == "apply":
        await desk.apply(source())
    else:
        desk.state.removed_path.unlink()
        await desk.restart(source())
    assert desk.stands_for() == {"hf:org/a": 1.0}
    with pytest.raises(AdapterUnknown):
        await desk.declaring.remove(LAW)


async def test_first_start_checks_folders_again(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "sql").mkdir()
    entry = {"name": "sql", "path": str(tmp_path / "sql")}
    for start, times in ((True, 1), (False, 1), (True, 2)):
        if start:
            desk.state.removed_path.unlink(missing_ok=True)
        await desk.restart(entry)
        assert len(desk.store.imported) == times


async def test_name_removed_during_its_import_stays_removed(desk: Desk) -> None:
    await desk.restart(source())
    desk.store.gate.clear()
    desk._declare((source(at="hf:org/b"),), applied=True)
    await desk.declaring.step()
    await desk.declaring.remove(SQL)
    desk.store.gate.set()
    await desk.settle()
    await desk.settle()
    assert desk.library.catalog.get(SQL) is None
    assert desk.declaring.troubles == {}


async def test_removed_name_may_be_used_by_the_api(desk: Desk) -> None:
    await desk.restart(source())
    await desk.declaring.remove(SQL)
    await desk.library.add(AddRequest(name="sql", source="hf:org/mine")).done.wait()
    await desk.settle()
    await desk.restart(source())
    assert desk.stands_for() == {"hf:org/mine": 1.0}
    await desk.apply(source())
    assert desk.stands_for() == {"hf:org/a": 1.0}


async def test_undeclared_names_are_kept(desk: Desk) -> None:
    await desk.restart(source())
    await desk.library.add(AddRequest(name="law", source="hf:org/law")).done.wait()
    await desk.apply()
    assert desk.library.catalog.get(SQL) is None
    assert desk.stands_for(LAW) == {"hf:org/law": 1.0}


async def test_undeclared_while_no_controller_ran(desk: Desk) -> None:
    await desk.restart(source(), source("law", "hf:org/law"))
    await desk.restart(source())
    assert desk.library.catalog.get(LAW) is None
    assert desk.stands_for() == {"hf:org/a": 1.0}


async def test_source_changed_during_its_import(desk: Desk) -> None:
    desk.store.gate.clear()
    desk.library = AdapterLibrary(lambda: desk.store, 5.0, lambda text: None)
    desk.declaring = DeclaredAdapters(desk.library, desk.state, lambda: desk.now)
    desk._declare((source(),), applied=False)
    await desk.library.open()
    await desk.declaring.step()
    assert desk.library.fetching() == {SQL: "waiting for other imports"}
    desk._declare((source(at="hf:org/b"),), applied=True)
    desk.store.gate.set()
    await desk.settle()
    await desk.settle()
    assert desk.stands_for() == {"hf:org/b": 1.0}


async def test_missing_declared_name_can_be_removed(desk: Desk) -> None:
    desk.store.contents["hf:org/a"] = unreachable("no route")
    await desk.restart(source())
    await desk.declaring.remove(SQL)
    assert desk.declaring.troubles == {}
    desk.now += 10 * RETRY.first_s
    await desk.settle()
    assert desk.store.imported == ["hf:org/a"]
    with pytest.raises(AdapterUnknown):
        await desk.declaring.remove(SQL)
