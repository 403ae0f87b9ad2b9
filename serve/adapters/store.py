"""The adapter store: files by digest in the state directory, records in the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from policy.config.deployment import Adapters, ModelSpec
from policy.types import EngineKind
from policy.wire.catalog import DIGITS, Alias
from serve.adapters.store_port import ImportedAdapter
from store.adapters import fetch_job
from store.adapters.base_model import BaseModel
from store.adapters.blobs import Blobs
from store.adapters.import_adapter import ImportLimits, import_adapter
from store.adapters.names import API, DOCUMENT, AdapterNames, NewVersion
from store.adapters.validate import AdapterFacts, ValidationLimits
from store.models.prepare import prepare
from store.progress import Report
from store.state_dir import StateDir

# How long a base model is cached: verifying its weights takes seconds for a large one.
BASE_S = 600.0


class LocalAdapterStore:
    """The :class:`serve.adapters.store_port.AdapterStore` on disk; opens database and folder at first use."""

    def __init__(self, state: StateDir, url: str) -> None:
        self._state = state
        self._url = url
        self._opening = threading.Lock()
        self._registry: AdapterNames | None = None
        self._blobs: Blobs | None = None
        self._preparing = threading.Lock()
        self._bases: dict[tuple[str, str | None], tuple[float, BaseModel]] = {}

    def aliases(self) -> tuple[Alias, ...]:
        return self._records.catalog(0.0, 0).aliases

    def declared(self) -> set[tuple[str, str]]:
        return self._records.declared()

    def redacted(self, source: str) -> str:
        return fetch_job.redacted(source)

    def take(self, spec: ModelSpec, source: str, report: Report) -> ImportedAdapter:
        rules = spec.adapters or Adapters()
        limits = ValidationLimits(rules.max_rank, rules.max_bytes)
        found = import_adapter(
            self._files, source, ImportLimits(self._base(spec, report), limits, spec.token_file), report
        )
        return ImportedAdapter(found.digest, found.facts.rank, found.facts.size, found.source)

    def holds(self, digest: str) -> bool:
        return self._files.path(digest) is not None

    def put(
        self,
        key: tuple[str, str],
        parts: Sequence[tuple[ImportedAdapter, float]],
        tenants: Collection[str] | None,
        *,
        declared: bool,
    ) -> Alias:
        candidates = [
            NewVersion(taken.digest, AdapterFacts(taken.rank, taken.size), taken.source, weight)
            for taken, weight in parts
        ]
        origin = DOCUMENT if declared else API
        return self._records.put(*key, candidates, tenants=tenants, origin=origin)

    def split(self, model: str, name: str, weights: Mapping[int, float]) -> Alias:
        return self._records.split(model, name, weights)

    def rollback(self, model: str, name: str) -> Alias:
        return self._records.rollback(model, name)

    def remove(self, model: str, name: str) -> None:
        self._records.remove(model, name)

    def tar(self, digest: str) -> Iterator[bytes] | None:
        try:
            return self._files.tar(digest)
        except KeyError:
            return None

    def clear(self, in_use: Collection[str], older_s: float) -> list[str]:
        used = {name.rpartition("@")[2] for name in in_use}
        unnamed = self._records.unused_digests(self._files.digests(), older_s)
        idle = sorted(digest for digest in unnamed if digest[:DIGITS] not in used)
        return [digest for digest in idle if self._files.remove(digest, older_s)]

    @property
    def _records(self) -> AdapterNames:
        with self._opening:
            if self._registry is None:
                self._registry = AdapterNames(self._url)
            return self._registry

    @property
    def _files(self) -> Blobs:
        with self._opening:
            if self._blobs is None:
                self._state.ensure()
                self._blobs = Blobs(self._state.adapters)
            return self._blobs

    def _base(self, spec: ModelSpec, report: Report) -> BaseModel | None:
        """The base model to validate adapters against; ``None`` for the simulated engine."""
        if spec.engine is EngineKind.SIM:
            return None
        key = (spec.source, spec.token_file)
        with self._preparing:
            at, base = self._bases.get(key, (0.0, None))
            if base is None or time.monotonic() - at > BASE_S:
                prepared = prepare(spec.source, token_file=spec.token_file, progress=report)
                base = BaseModel.of(prepared.path)
                self._bases[key] = (time.monotonic(), base)
            return base
