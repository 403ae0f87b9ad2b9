"""Reconciles the adapters of the deployment file: adds declared ones, removes those no longer declared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from policy.config.deployment import AdapterSource, Deployment
from policy.errors import AdapterRefused, AdapterUnknown
from policy.stats.backoff import Backoff
from policy.wire.adapter_catalog import Alias
from serve.adapters.adapter_registry import AdapterRegistry
from serve.adapters.add_job_state import AddAdapterJob, Key, is_remote
from serve.async_waiting import run_in_thread
from store.adapters.fetch_context import identity
from store.state_dir import StateDir

# Delays between attempts to add an adapter.
RETRY = Backoff(5.0, 300.0)
# How often the files of declared adapters are looked for, in seconds.
LOOK_S = 60.0


class DeclarationError(NamedTuple):
    """Why a declared adapter is missing: ``refused`` or unreachable; the next attempt is at ``retry_at``."""

    reason: str
    refused: bool
    attempts: int
    retry_at: float


class _Import(NamedTuple):
    """A running job, the stamps of its files when it began, and the names that were to be looked at then."""

    entry: AdapterSource
    stamps: dict[str, int]
    again: set[Key]
    job: AddAdapterJob


class DeclaredAdapterReconciler:
    """Compares the declared adapters with the existing ones whenever :meth:`step` is called.

    Changes that users make to a declared name through the API stay until the deployment file declares
    something else for it. Names that users removed are stored in the state directory. If nothing is stored
    there, this is the first start, which counts as an apply.
    """

    def __init__(self, library: AdapterRegistry, state: StateDir, monotonic: Callable[[], float]) -> None:
        self._library = library
        self._state = state
        self._monotonic = monotonic
        removed = state.load(state.removed_path, list[Key])
        self._removed: set[Key] = set(removed or ())
        self._fresh = removed is None
        self._wanted: dict[Key, AdapterSource] = {}
        self._made: set[Key] | None = None
        # The digests of declared sources, by their identities, as last read from the records.
        self._recorded: dict[Key, dict[str, str]] = {}
        self._secret = state.secret()
        self._done: dict[Key, AdapterSource] = {}
        self._running: dict[Key, _Import] = {}
        # The names that an apply wants compared with their files: a new set for each apply.
        self._again: set[Key] = set()
        self._stamps: dict[str, int] = {}
        # The names that lack files of a version that gets requests.
        self._lost: set[Key] = set()
        self._look_at = 0.0
        self.troubles: dict[Key, DeclarationError] = {}

    def declare(self, deployment: Deployment, *, applied: bool) -> None:
        """Set the deployment; if it was just ``applied``, every declared adapter is checked again."""
        self._wanted = {
            (spec.name, source.name): source
            for spec in deployment.models
            if spec.adapters is not None
            for source in spec.adapters.sources
        }
        self.troubles = {key: trouble for key, trouble in self.troubles.items() if key in self._wanted}
        if applied or self._fresh:
            self._again = set(self._wanted)
            self.troubles.clear()
            if self._removed or (self._fresh and self._wanted):
                # Where this raises, the next apply or remove tries again.
                self._state.save(self._state.removed_path, [])
                self._removed = set()
                self._fresh = False

    async def remove(self, key: Key) -> None:
        """Remove a name at a user's request; raises :class:`AdapterUnknown`.

        A declared name stays removed until the deployment file is applied again.
        """
        await self._library.read()
        ours = key in self._wanted and key not in self._removed
        if ours:
            removed = self._removed | {key}
            self._state.save(self._state.removed_path, sorted(removed))
            self._removed = removed
            self.troubles.pop(key, None)
        try:
            await self._library.remove(key)
        except AdapterUnknown:
            # A declared adapter that was not added yet is not added any more.
            if not ours:
                raise
        if self._made is not None:
            self._made.discard(key)

    async def step(self) -> None:
        """Start missing jobs, handle ended ones, and remove names that are no longer declared."""
        if self._made is None:
            self._recorded = await self._library.declared()
            self._made = set(self._recorded)
        for key, running in list(self._running.items()):
            if running.job.done.is_set():
                self._end(key, running)
        for key in self._made - self._wanted.keys() - self._running.keys():
            with contextlib.suppress(AdapterUnknown):
                await self._library.remove(key)
            self._made.discard(key)
            self._done.pop(key, None)
        if self._monotonic() >= self._look_at:
            self._look_at = self._monotonic() + LOOK_S
            self._lost = await self._without_files()
        wanted = self._wanted
        due = [key for key in wanted if key not in self._running and self._is_due(key)]
        if due:
            sources = [source for key in due for source, _ in _parts(wanted[key])]
            stamps = await run_in_thread(lambda: _stamps(sources), "adapters-look")
            self._recorded = await self._library.declared()
            for key in due:
                # A deployment or a removal may have come meanwhile; the next step looks anew.
                if self._wanted is wanted and self._is_due(key):
                    self._begin(key, stamps)

    def _is_due(self, key: Key) -> bool:
        if key in self._removed:
            return False
        trouble = self.troubles.get(key)
        if trouble is not None:
            return self._monotonic() >= trouble.retry_at
        if key in self._again or key in self._lost:
            return True
        alias = self._library.catalog.get(key)
        if alias is None:
            return True
        return self._done.get(key) != self._wanted[key] and not self._matches(key, alias)

    async def _without_files(self) -> set[Key]:
        """The declared names that lack files of a declared version that gets requests.

        A new leader has the records of the former one, but may have another disk.
        """
        self._recorded = await self._library.declared()
        served: dict[Key, set[str]] = {}
        for key in self._wanted:
            if (alias := self._library.catalog.get(key)) is not None:
                used = {version.digest for number, _ in alias.split if (version := alias.version(number))}
                served[key] = used.intersection(self._digests(key).values())
        missing = await self._library.missing(set().union(*served.values())) if served else set()
        return {key for key, digests in served.items() if digests & missing}

    def _matches(self, key: Key, alias: Alias) -> bool:
        """Whether ``alias`` is as declared."""
        entry = self._wanted[key]
        numbers = {version.digest: version.number for version in alias.versions}
        digests = self._digests(key)
        parts = [(numbers.get(digests.get(source, ""), 0), weight) for source, weight in _parts(entry)]
        split = sorted(part for part in parts if part[1])
        return split == list(alias.split) and set(entry.tenants) == set(alias.tenants)

    def _digests(self, key: Key) -> Mapping[str, str]:
        """The digests of the sources that are declared now and were declared before."""
        recorded = self._recorded.get(key, {})
        identities = {source: identity(source, self._secret) for source, _ in _parts(self._wanted[key])}
        return {source: recorded[each] for source, each in identities.items() if each in recorded}

    def _begin(self, key: Key, stamps: dict[str, int]) -> None:
        entry, alias = self._wanted[key], self._library.catalog.get(key)
        parts = _parts(entry)
        versions = {version.digest: version for version in alias.versions} if alias else {}
        known = {
            source: versions[digest]
            for source, digest in self._digests(key).items()
            # One that does not fit the base model is imported again, which says so, or accepts it by force.
            if digest in versions
            and digest not in self._library.unfit.get(key[0], {})
            and not (key in self._again and stamps.get(source) != self._stamps.get(source))
        }
        adding = AddAdapterJob(key, parts, entry.tenants, known=known, declared=True, any_base=entry.force)
        seen = {source: stamps[source] for source, _ in parts if source in stamps}
        self._running[key] = _Import(entry, seen, self._again, self._library.begin(adding))

    def _end(self, key: Key, ended: _Import) -> None:
        assert self._made is not None
        del self._running[key]
        source, error = ended.entry, ended.job.error
        if error is None:
            self._made.add(key)
            self._done[key] = source
            # After a failure the files still count as new, so that the next attempt imports them.
            self._stamps |= ended.stamps
            ended.again.discard(key)
            self._lost.discard(key)
            self.troubles.pop(key, None)
            return
        last = self.troubles.get(key)
        attempts = 1 + (last.attempts if last is not None else 0)
        refused = isinstance(error, AdapterRefused) and error.code != "source_unreachable"
        if self._wanted.get(key) == source and key not in self._removed:
            retry_at = self._monotonic() + RETRY.delay_s(attempts)
            self.troubles[key] = DeclarationError(str(error), refused, attempts, retry_at)


def _parts(entry: AdapterSource) -> tuple[tuple[str, float], ...]:
    """The sources of a declaration, with their weights."""
    if entry.versions:
        return tuple((version.source, version.weight) for version in entry.versions.values())
    return ((entry.source or entry.path, 1.0),)


def _stamps(sources: Iterable[str]) -> dict[str, int]:
    """A fingerprint of the files at each path; it changes when they change."""
    return {source: _stamp(Path(source)) for source in sources if not is_remote(source)}


def _stamp(path: Path) -> int:
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return hash(tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files))
    except OSError:
        return 0
