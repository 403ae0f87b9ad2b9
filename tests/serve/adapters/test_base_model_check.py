"""Stored adapters are checked again when their base model changes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from policy.errors import TargetError, Unreachable
from policy.wire.controller import AddAdapterRequest
from serve.adapters.adapter_registry import AdapterRegistry
from serve.adapters.base_model_check import BaseModelChecker
from store.state_dir import StateDir
from tests.serve.fake_adapter_store import FakeAdapterStore, digest_of
from tests.serve.sim_documents import deployment, sim_model

SQL, LAW = ("m", "sql"), ("m", "law")
OLD, NEW = "/base", "/other-base"
REASON = "v1 does not fit the model: made for another"


@dataclass
class Checked:
    """The adapters of one model; ``restart`` makes another controller over the same records."""

    state: StateDir
    store: FakeAdapterStore = field(init=False)
    events: list[str] = field(default_factory=list)
    library: AdapterRegistry = field(init=False)
    checker: BaseModelChecker = field(init=False)

    def __post_init__(self) -> None:
        self.store = FakeAdapterStore(self.state.root)

    async def restart(self, base: str) -> dict[tuple[str, str], str]:
        self.library = AdapterRegistry(lambda: self.store, 5.0, lambda text: None)
        self.checker = BaseModelChecker(self.library, self.state, self.events.append)
        self.declare(base)
        await self.library.open()
        return await self.step()

    async def apply(self, base: str) -> dict[tuple[str, str], str]:
        self.declare(base)
        return await self.step()

    def declare(self, base: str) -> None:
        self.library.declare(deployment(sim_model(source=base, adapters={})))

    async def step(self) -> dict[tuple[str, str], str]:
        await self.checker.step()
        return self.checker.notes()

    async def add(self, name: str, at: str) -> None:
        await self.library.add(AddAdapterRequest(name=name, source=at)).done.wait()


@pytest.fixture
async def checked(tmp_path: Path) -> Checked:
    """With two adapters that were made for :data:`OLD`; one does not fit another base model."""
    made = Checked(StateDir(tmp_path).ensure())
    await made.restart(OLD)
    await made.add("sql", "/sql")
    await made.add("law", "/law")
    made.store.unfit = {digest_of("/sql"): "made for another"}
    return made


async def test_adapters_are_checked_when_the_base_model_changes(checked: Checked) -> None:
    """They were served on a base model that they were not made for, without a word."""
    assert await checked.apply(OLD) == await checked.restart(OLD) == {}
    assert checked.store.checked == []
    assert await checked.apply(NEW) == {SQL: REASON}
    assert checked.events == [f"adapters: 1 versions on m do not fit {NEW}"]
    assert await checked.step() == await checked.restart(NEW) == {SQL: REASON}
    assert checked.store.checked == [(OLD, NEW)], "once for each change"
    checked.store.unfit = {}
    assert await checked.apply(OLD) == {}


async def test_a_base_model_that_changed_while_no_controller_ran_is_noticed(checked: Checked) -> None:
    assert await checked.restart(NEW) == {SQL: REASON}


async def test_an_import_for_the_new_base_model_ends_the_note(checked: Checked) -> None:
    await checked.apply(NEW)
    await checked.add("sql", "/sql")
    assert await checked.step() == await checked.restart(NEW) == {}


async def test_a_check_that_fails_is_repeated(checked: Checked) -> None:
    unfit, checked.store.unfit = checked.store.unfit, Unreachable("no route")
    for _ in range(2):
        with pytest.raises(Unreachable):
            await checked.apply(NEW)
    checked.store.unfit = unfit
    assert await checked.restart(NEW) == {SQL: REASON}


async def test_an_adapter_whose_base_model_changes_during_its_import_is_not_added(checked: Checked) -> None:
    """It was validated for the former one."""
    checked.store.gate.clear()
    adding = checked.library.add(AddAdapterRequest(name="sql", source="/new"))
    while "/new" not in checked.store.imported:  # noqa: ASYNC110 - the thread has no event
        await asyncio.sleep(0.001)
    checked.declare(NEW)
    checked.store.gate.set()
    await adding.done.wait()
    assert isinstance(adding.error, TargetError)
    assert await checked.step() == {SQL: REASON}
