"""A shelf in memory: its sources are what a test says, and are taken when a test lets them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from policy.config.deployment import ModelSpec
from policy.errors import AdapterRefused, AdapterUnknown, TidegateError
from policy.wire.catalog import Alias, Version
from serve.adapters.add_job import ImportedAdapter
from store.progress import Progress, Report

Key = tuple[str, str]


def digest_of(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


@dataclass
class FakeShelf:
    """``contents`` of sources, which are themselves where nothing else is said, or why they fail.

    ``gate`` holds up whoever takes, ``down`` is why the database does not answer.
    """

    contents: dict[str, str | Exception] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)
    down: str = ""
    kept: dict[Key, Alias] = field(default_factory=dict)
    history: dict[Key, list[tuple[tuple[int, float], ...]]] = field(default_factory=dict)
    made: set[Key] = field(default_factory=set)
    lying: set[str] = field(default_factory=set)
    took: list[str] = field(default_factory=list)
    cleared: list[set[str]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.gate.set()

    def aliases(self) -> tuple[Alias, ...]:
        self._answer()
        return tuple(self.kept.values())

    def declared(self) -> set[Key]:
        self._answer()
        return set(self.made)

    def redacted(self, source: str) -> str:
        return source

    def take(self, spec: ModelSpec, source: str, report: Report) -> ImportedAdapter:
        with self._lock:
            self.took.append(source)
        report(Progress(step="fetch", message=source, fraction=0.5))
        assert self.gate.wait(60)
        content = self.contents.get(source, source)
        if isinstance(content, Exception):
            raise content
        self.lying.add(digest_of(content))
        return ImportedAdapter(digest_of(content), 8, 1000, source)

    def holds(self, digest: str) -> bool:
        return digest in self.lying

    def put(
        self,
        key: Key,
        parts: Sequence[tuple[ImportedAdapter, float]],
        tenants: Collection[str] | None,
        *,
        declared: bool,
    ) -> Alias:
        self._answer()
        before = self.kept.get(key)
        versions = {version.digest: version for version in before.versions} if before else {}
        for taken, _ in parts:
            number = len(versions) + 1
            versions.setdefault(
                taken.digest,
                Version(
                    number=number,
                    digest=taken.digest,
                    rank=taken.rank,
                    size=taken.size,
                    source=taken.source,
                    at=1.0,
                ),
            )
        split = tuple((versions[taken.digest].number, weight) for taken, weight in parts)
        if declared:
            self.made.add(key)
        if tenants is None:
            tenants = before.tenants if before else ()
        return self._keep(key, split, tuple(versions.values()), tuple(tenants))

    def split(self, model: str, name: str, weights: Mapping[int, float]) -> Alias:
        before = self._known((model, name))
        return self._keep((model, name), tuple(weights.items()), before.versions, before.tenants)

    def rollback(self, model: str, name: str) -> Alias:
        before = self._known((model, name))
        split = self.history[model, name].pop()
        after = msgspec.structs.replace(before, split=split, revision=before.revision + 1)
        self.kept[model, name] = after
        return after

    def remove(self, model: str, name: str) -> None:
        self._known((model, name))
        del self.kept[model, name]
        self.made.discard((model, name))

    def tar(self, digest: str) -> Iterator[bytes] | None:
        return iter([b"tar of ", digest.encode()]) if digest in self.lying else None

    def clear(self, in_use: Collection[str], older_s: float) -> list[str]:
        self.cleared.append(set(in_use))
        return []

    def _keep(
        self,
        key: Key,
        split: tuple[tuple[int, float], ...],
        versions: tuple[Version, ...],
        tenants: tuple[str, ...],
    ) -> Alias:
        before = self.kept.get(key)
        if before is not None and (before.split, before.versions, before.tenants) == (
            split,
            versions,
            tenants,
        ):
            return before
        if before is not None and before.split != split:
            self.history.setdefault(key, []).append(before.split)
        revision = 1 + (before.revision if before else 0)
        self.kept[key] = Alias(
            model=key[0], name=key[1], revision=revision, versions=versions, split=split, tenants=tenants
        )
        return self.kept[key]

    def _known(self, key: Key) -> Alias:
        self._answer()
        if key not in self.kept:
            raise AdapterUnknown(f"there is no adapter {key[1]}")
        return self.kept[key]

    def _answer(self) -> None:
        if self.down:
            raise TidegateError(self.down)


def unreachable(why: str = "away") -> AdapterRefused:
    return AdapterRefused("source_unreachable", why)
