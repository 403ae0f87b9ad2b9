"""A process that changes adapters is killed at any moment: every change is atomic."""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from policy.errors import AdapterUnknown
from store.adapters.adapter_aliases import AdapterAliases, NewVersion
from store.adapters.blobs import AdapterBlobStore
from store.adapters.import_adapter import import_adapter
from store.adapters.validate import AdapterFacts
from tests.store.adapters.making import TERMS, files, write, zipped

State = dict[str, float] | None


class Site:
    """A store, three adapters to add, and the expected state after each step of a round."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"sqlite:///{root / 't.db'}"
        self.blobs = root / "adapters"
        self.sources = {
            "a": write(root / "a", files(0)),
            "b": root / "b.zip",
            "c": write(root / "c", files(2)),
        }
        self.sources["b"].write_bytes(zipped(files(1)))
        elsewhere = AdapterBlobStore(root / "elsewhere")
        self.digests = {
            import_adapter(elsewhere, str(source), TERMS, lambda _: None).digest: name
            for name, source in self.sources.items()
        }
        both = {"a": 95.0, "b": 5.0}
        self.after: tuple[State, ...] = (
            *(None, {"a": 1.0}, {"b": 1.0}, both, {"c": 1.0}),
            *(both, {"a": 1.0}, None, None),
        )

    def steps(self, registry: AdapterAliases, blobs: AdapterBlobStore) -> list[Callable[[], object]]:
        def add(name: str) -> Callable[[], object]:
            def run() -> None:
                taken = import_adapter(blobs, str(self.sources[name]), TERMS, lambda _: None)
                registry.put("m", "sql", [taken])

            return run

        def collect() -> None:
            for digest in registry.unused_digests(blobs.digests(), older_s=-1.0):
                blobs.remove(digest)

        return [
            lambda: None,
            add("a"),
            add("b"),
            lambda: registry.split("m", "sql", {1: 95, 2: 5}),
            add("c"),
            lambda: registry.rollback("m", "sql"),
            lambda: registry.rollback("m", "sql"),
            lambda: registry.remove("m", "sql"),
            collect,
        ]

    def work(self, say: Callable[[str], object]) -> NoReturn:
        registry, blobs = AdapterAliases(self.url), AdapterBlobStore(self.blobs)
        steps = self.steps(registry, blobs)
        with suppress(AdapterUnknown):
            registry.remove("m", "sql")
        while True:
            for number, step in enumerate(steps):
                say(f"b{number}\n")
                step()
                say(f"d{number}\n")

    def state(self) -> State:
        """The split of the alias, after a check of every file."""
        blobs = AdapterBlobStore(self.blobs)
        assert all(blobs.path(digest) is not None for digest in blobs.digests())
        assert not list(self.blobs.glob(".work-*"))
        registry = AdapterAliases(self.url)
        aliases = registry.catalog(0, 0).aliases
        registry.close()
        if not aliases:
            return None
        (alias,) = aliases
        for version in alias.versions:
            assert blobs.path(version.digest) is not None, "what a name may stand for is there"
        assert alias.split
        return {
            self.digests[version.digest]: weight
            for number, weight in alias.split
            for version in alias.versions
            if version.number == number
        }


def killed(work: Callable[[Callable[[str], object]], object], after_s: float) -> list[str]:
    """The output of a process that was killed so many seconds after its first line."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work(lambda text: os.write(writing, text.encode()))
        finally:
            os._exit(1)
    os.close(writing)
    assert select.select([reading], [], [], 60.0)[0], "it says something"
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it works until it is killed"
    with os.fdopen(reading) as lines:
        return lines.read().split()


@pytest.mark.process
def test_a_kill_during_the_creation_of_the_database_leaves_it_usable(tmp_path: Path) -> None:
    def url(number: int) -> str:
        return f"sqlite:///{tmp_path / str(number)}.db"

    def work(say: Callable[[str], object]) -> NoReturn:
        number = 0
        while True:
            AdapterAliases(url(number)).close()
            number += 1
            say(f"{number}\n")

    chance = random.Random(7)  # noqa: S311
    for _ in range(5):
        for path in tmp_path.iterdir():
            path.unlink()
        number = int(killed(work, chance.uniform(0.0, 0.1))[-1])
        registry = AdapterAliases(url(number))
        registry.put("m", "sql", [NewVersion("a" * 64, AdapterFacts(8, 1), "")])
        assert registry.revision() == 1
        registry.close()


@pytest.mark.parametrize(
    "times", [pytest.param(25, marks=pytest.mark.process), pytest.param(100, marks=pytest.mark.long)]
)
def test_a_kill_at_any_moment_leaves_the_state_before_or_after_a_step(tmp_path: Path, times: int) -> None:
    site = Site(tmp_path)
    chance = random.Random(7)  # noqa: S311
    between = set()
    for _ in range(times):
        lines = killed(site.work, chance.uniform(0.0, 0.25))
        what, number = lines[-1][0], int(lines[-1][1:])
        expected = [site.after[number]]
        if what == "b":
            expected.append(site.after[number - 1])
            between.add(number)
        assert site.state() in expected, lines[-3:]
    assert len(between) > 1, "it was killed within different steps"
