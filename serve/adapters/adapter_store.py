"""The adapter store: files by digest in the state directory, records in the database."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

from policy.config.deployment import AdaptersConfig, ModelSpec
from policy.errors import AdapterRefused
from policy.types import EngineKind
from policy.wire.adapter_catalog import DIGITS, Alias, CatalogVersion
from store.adapters.adapter_aliases import API, DOCUMENT, AdapterAliases, NewVersion
from store.adapters.base_model_shapes import BaseModelShapes
from store.adapters.blobs import AdapterBlobStore
from store.adapters.fetch_context import identity
from store.adapters.import_adapter import ImportLimits, import_adapter
from store.adapters.public_hosts import PublicHosts
from store.adapters.validate import AdapterFacts, ValidationLimits, base_name, validate
from store.model_weights.prepare import prepare
from store.progress_report import Report
from store.state_dir import StateDir

log = logging.getLogger("tidegate.adapters")

# How long a base model is cached: verifying its weights takes seconds for a large one.
BASE_S = 600.0


class AdapterStore:
    """The files of adapters, and their records (``names``); opens database and folder at first use.

    Every call blocks, may come from any thread, and may raise :class:`policy.errors.TidegateError`.
    """

    def __init__(self, state: StateDir, url: str) -> None:
        self._state = state
        self._url = url
        self._preparing = threading.Lock()
        self._bases: dict[tuple[str, str, str | None], tuple[float, BaseModelShapes]] = {}

    def aliases(self) -> tuple[Alias, ...]:
        """The aliases of all names."""
        return self.names.catalog(0.0, 0).aliases

    def take(
        self, spec: ModelSpec, source: str, report: Report, *, declared: bool = False, any_base: bool = False
    ) -> NewVersion:
        """Fetch the adapter at ``source``, validate it for the model and store it.

        A source that the deployment file does not declare is fetched from public hosts alone, and from
        ``adapters.private_hosts``. With ``any_base`` it may name another base model. Raises
        :class:`policy.errors.AdapterRefused`. The same source may be imported again at any time.
        """
        rules = spec.adapters or AdaptersConfig()
        limits = ValidationLimits(rules.max_rank, rules.max_bytes, any_base)
        hosts = None if declared else PublicHosts(rules.private_hosts)
        terms = ImportLimits(self._base(spec, report), limits, spec.token_file, hosts)
        return import_adapter(self._files, source, terms, report)

    def refusals(
        self, spec: ModelSpec, digests: Collection[str], former: str, refused: Collection[str]
    ) -> dict[str, str]:
        """Why stored adapters do not fit the base model of ``spec``, by digest; it was ``former`` before.

        One that named another model than ``former``, and was not ``refused`` for that, was added by force,
        and may name any. Files that are not stored are left out. Raises
        :class:`policy.errors.TidegateError` if the base model cannot be read.
        """
        paths = {digest: path for digest in sorted(digests) if (path := self._files.path(digest)) is not None}
        base = self._base(spec, lambda progress: log.info("%s", progress.message)) if paths else None
        if base is None:
            return {}
        rules = spec.adapters or AdaptersConfig()
        before = BaseModelShapes({}, (former, spec.name))
        found = {}
        for digest, path in paths.items():
            try:
                forced = digest not in refused and not before.is_called(base_name(path))
                validate(path, base, ValidationLimits(rules.max_rank, rules.max_bytes, forced))
            except AdapterRefused as error:
                found[digest] = str(error)
        return found

    def stored(self, version: CatalogVersion) -> NewVersion | None:
        """A version that was taken before, if its files are still stored."""
        if self._files.path(version.digest) is None:
            return None
        return NewVersion(version.digest, AdapterFacts(version.rank, version.size), version.source)

    def missing(self, digests: Collection[str]) -> set[str]:
        """Those of ``digests`` whose files are not stored, as far as is known without reading them."""
        return self._files.missing(digests)

    def identity(self, source: str) -> str:
        """A text for records that differs for any two sources."""
        return identity(source, self._secret)

    def put(
        self,
        key: tuple[str, str],
        versions: Sequence[NewVersion],
        tenants: Collection[str] | None,
        *,
        declared: bool,
        percent: float | None = None,
    ) -> Alias:
        """Set the versions of a name (``key``: model, name) by their weights; durable when it returns.

        ``tenants`` of ``None`` keeps those of the name. ``percent`` is the part of the requests for the only
        version, the rest stays as it is. A digest that is among its versions keeps its number.
        The same declaration again (``declared``) changes nothing.
        """
        origin = DOCUMENT if declared else API
        return self.names.put(*key, versions, tenants=tenants, origin=origin, percent=percent)

    def tar(self, digest: str) -> Iterator[bytes] | None:
        """The files of a version as a tar, in blocks; ``None`` if there are none."""
        try:
            return self._files.tar(digest)
        except KeyError:
            return None

    def clear(self, in_use: Collection[str], older_s: float) -> list[str]:
        """Delete files that no name used for ``older_s`` seconds and that are not in use; their digests.

        ``in_use`` are serving names, which contain the beginning of a digest. Abandoned downloads are deleted
        too.
        """
        self._files.clear_abandoned()
        used = {name.rpartition("@")[2] for name in in_use}
        unnamed = self.names.unused_digests(self._files.digests(), older_s)
        idle = sorted(digest for digest in unnamed if digest[:DIGITS] not in used)
        return [digest for digest in idle if self._files.remove(digest, older_s)]

    @cached_property
    def _secret(self) -> str:
        return self._state.secret()

    @cached_property
    def names(self) -> AdapterAliases:
        """The records."""
        return AdapterAliases(self._url)

    @cached_property
    def _files(self) -> AdapterBlobStore:
        return AdapterBlobStore(self._state.ensure().adapters)

    def _base(self, spec: ModelSpec, report: Report) -> BaseModelShapes | None:
        """The base model to validate adapters against; ``None`` for the simulated engine."""
        if spec.engine is EngineKind.SIM:
            return None
        key = (spec.name, spec.source, spec.token_file)
        with self._preparing:
            at, base = self._bases.get(key, (0.0, None))
            if base is None or time.monotonic() - at > BASE_S:
                prepared = prepare(spec.source, token_file=spec.token_file, progress=report)
                base = BaseModelShapes.of(prepared.path, (spec.source, spec.name))
                self._bases[key] = (time.monotonic(), base)
            return base
