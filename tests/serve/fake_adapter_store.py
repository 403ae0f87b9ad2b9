"""An adapter store whose imports a test controls; its records are real."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from policy.config.deployment import ModelSpec
from policy.errors import AdapterRefused, TidegateError
from policy.wire.adapter_catalog import Alias, CatalogVersion
from serve.adapters.adapter_store import AdapterStore
from store.adapters.adapter_aliases import NewVersion
from store.adapters.fetch_context import redacted
from store.adapters.validate import AdapterFacts
from store.progress_report import ProgressLine, Report
from store.state_dir import StateDir

Key = tuple[str, str]


def digest_of(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def new_version(content: str, source: str) -> NewVersion:
    return NewVersion(digest_of(content), AdapterFacts(8, 1000), source)


class FakeAdapterStore(AdapterStore):
    """``contents`` maps sources to their content (default: the source itself) or to an error.
    ``unfit`` says which digests do not fit another base model.

    Imports wait for ``gate``; ``down`` is the error of an unavailable database.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(StateDir(folder), f"sqlite:///{folder / 'store.db'}")
        self.contents: dict[str, str | Exception] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.down = ""
        self.digests: set[str] = set()
        self.imported: list[str] = []
        self.unfit: dict[str, str] | Exception = {}
        self.checked: list[tuple[str, str]] = []
        self.cleared: list[set[str]] = []

    @property
    def records(self) -> dict[Key, Alias]:
        return {(alias.model, alias.name): alias for alias in super().aliases()}

    def aliases(self) -> tuple[Alias, ...]:
        self._answer()
        return super().aliases()

    def take(self, spec: ModelSpec, source: str, report: Report, **_: bool) -> NewVersion:  # type: ignore[override]
        report(ProgressLine(step="fetch", message=source, fraction=0.5))
        self.imported.append(source)  # after its report, for which tests wait by this
        assert self.gate.wait(60)
        content = self.contents.get(source, source)
        if isinstance(content, Exception):
            raise content
        self.digests.add(digest_of(content))
        return new_version(content, redacted(source))

    def stored(self, version: CatalogVersion) -> NewVersion | None:
        if version.digest not in self.digests:
            return None
        return NewVersion(version.digest, AdapterFacts(version.rank, version.size), version.source)

    def refusals(
        self, spec: ModelSpec, digests: Collection[str], former: str, refused: Collection[str]
    ) -> dict[str, str]:
        self.checked.append((former, spec.source))
        if isinstance(self.unfit, Exception):
            raise self.unfit
        return {digest: self.unfit[digest] for digest in digests if digest in self.unfit}

    def missing(self, digests: Collection[str]) -> set[str]:
        return set(digests) - self.digests

    def put(self, *args: Any, **options: Any) -> Alias:
        self._answer()
        return super().put(*args, **options)

    def tar(self, digest: str) -> Iterator[bytes] | None:
        return iter([b"tar of ", digest.encode()]) if digest in self.digests else None

    def clear(self, in_use: Collection[str], older_s: float) -> list[str]:
        self.cleared.append(set(in_use))
        return []

    def _answer(self) -> None:
        if self.down:
            raise TidegateError(self.down)


def unreachable(why: str = "away") -> AdapterRefused:
    return AdapterRefused("source_unreachable", why)
