"""The adapter library of the controller: adds adapters, publishes the catalog, deletes unused files.

What is published or acknowledged is durable. Files are stored before a record names them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import msgspec

from policy.config.deployment import Deployment, ModelSpec
from policy.errors import AdapterRefused, AdapterUnknown, ConfigError, TargetError, TidegateError, Unreachable
from policy.stats.backoff import Backoff
from policy.wire.adapter_catalog import NAME, Alias, CatalogSnapshot
from policy.wire.controller import AddAdapterRequest
from serve.adapters.add_job_state import AddAdapterJob, Key
from serve.async_waiting import run_in_thread, wait_at_most
from serve.state.versioned_watch import Revision
from store.progress_report import ProgressLine

if TYPE_CHECKING:
    # They import the database, which takes long.
    from serve.adapters.adapter_store import AdapterStore
    from store.adapters.adapter_aliases import NewVersion

log = logging.getLogger("tidegate.adapters")

# Maximum concurrent imports from other machines, and again from this one: slow servers delay only the first.
ADDS_AT_ONCE = 4
# Unused files are kept this long: a replica may be pulling them, or a gateway may have an older catalog.
GRACE_S = 600.0
RETRY = Backoff(1.0, 60.0)
# How long a request waits for a controller that is starting, in seconds.
PATIENCE_S = 5.0

Event = Callable[[str], None]
_VERSION = re.compile(r"v([1-9][0-9]{0,8})")


class AdapterCatalogPublisher:
    """The aliases by base model and name. Those of models that are not served are kept but not published."""

    def __init__(self, epoch: float, term: int) -> None:
        self._epoch = epoch
        self._term = term
        self.revision = Revision()
        self._aliases: dict[Key, Alias] = {}
        self._line: tuple[int, bytes] = (0, b"")
        self.models: tuple[str, ...] = ()

    def serve(self, models: Iterable[str]) -> None:
        """Publish the aliases of these models."""
        self.models = tuple(models)
        self.revision.bump()

    def fill(self, aliases: Iterable[Alias]) -> None:
        """Replace all aliases."""
        self._aliases = {(alias.model, alias.name): alias for alias in aliases}
        self.revision.bump()

    def put(self, alias: Alias) -> None:
        """Set one alias; an equal one causes no new version."""
        key = (alias.model, alias.name)
        if self._aliases.get(key) != alias:
            self._aliases[key] = alias
            self.revision.bump()

    def drop(self, key: Key) -> None:
        """Remove one alias."""
        self._aliases.pop(key, None)
        self.revision.bump()

    def get(self, key: Key) -> Alias | None:
        """The alias of one name, whether its model is served or not."""
        return self._aliases.get(key)

    def of(self, model: str) -> list[Alias]:
        """The aliases of a model; none if it is not served."""
        return [alias for alias in self._aliases.values() if alias.model == model and model in self.models]

    def line(self) -> tuple[int, bytes]:
        """The version of the catalog, and the catalog as a JSON line."""
        if self._line[0] != self.revision.number:
            aliases = tuple(alias for alias in self._aliases.values() if alias.model in self.models)
            catalog = CatalogSnapshot(
                epoch=self._epoch, version=self.revision.number, aliases=aliases, term=self._term
            )
            self._line = (self.revision.number, msgspec.json.encode(catalog) + b"\n")
        return self._line


class AdapterRegistry:
    """The adapters of all models; for one event loop, with blocking work in threads.

    The store is opened when the first model has an `adapters` section.
    """

    def __init__(
        self, open_store: Callable[[], AdapterStore], epoch: float, event: Event, *, term: int = 0
    ) -> None:
        self._open_store = open_store
        self._store: AdapterStore
        self._event = event
        self.catalog = AdapterCatalogPublisher(epoch, term)
        self._specs: dict[str, ModelSpec] = {}
        self._names: frozenset[str] = frozenset()
        self._tenants: tuple[str, ...] = ()
        self._opened = asyncio.Event()
        self._turns: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        # One for remote sources, one for local ones.
        self._slots = {remote: asyncio.Semaphore(ADDS_AT_ONCE) for remote in (False, True)}
        self._writing = asyncio.Lock()
        # Why stored versions do not fit the base model of their model, by digest.
        self.unfit: dict[str, dict[str, str]] = {}
        # The jobs that run or wait.
        self.jobs: dict[AddAdapterJob, asyncio.Task[None]] = {}

    def declare(self, deployment: Deployment) -> None:
        """Set the models with an `adapters` section, and the tenants."""
        self._names = frozenset(spec.name for spec in deployment.models)
        self._specs = {spec.name: spec for spec in deployment.models if spec.adapters and spec.is_scaled}
        self._tenants = tuple(tenant.name for tenant in deployment.tenants)
        self.catalog.serve(self._specs)

    async def open(self) -> None:
        """Return once the records are read; they are read when a model has an `adapters` section."""
        failures = 0
        while not self._opened.is_set():
            if not self._specs:
                await self.catalog.revision.changed()
                continue
            try:
                self._store, found = await run_in_thread(self._read, "adapters-open")
            except (TidegateError, OSError) as error:
                self._event(f"adapters: {error}")
                failures += 1
                await asyncio.sleep(RETRY.delay_s(failures))
                continue
            self.catalog.fill(found)
            self._opened.set()

    @property
    def is_open(self) -> bool:
        """Whether the records are read."""
        return self._opened.is_set()

    async def read(self) -> None:
        """Return once the records are read, if needed; may raise :class:`Unreachable`."""
        if self._specs and not await wait_at_most(self._opened, PATIENCE_S):
            raise Unreachable("the records of adapters cannot be read yet")

    def fetching(self) -> dict[Key, str]:
        """A progress message for each name that is being added; for several jobs of one name, the first."""
        pending = [adding for adding in self.jobs if not adding.done.is_set()]
        return {adding.key: adding.line.message for adding in reversed(pending)}

    async def line(self) -> tuple[int, bytes]:
        """The version of the catalog and the catalog as a JSON line, once the records are read."""
        while self._specs and not self._opened.is_set():
            await self._opened.wait()
        return self.catalog.line()

    # Requests of users.

    def add(self, wanted: AddAdapterRequest) -> AddAdapterJob:
        """Begin to add or replace an adapter; raises as :func:`check_add`, and :class:`TargetError`."""
        model = self._model(wanted.model)
        check_add(wanted, self._names, self._tenants)
        parts = ((wanted.source, 1.0),)
        job = AddAdapterJob(
            (model, wanted.name), parts, wanted.tenants, percent=wanted.weight, any_base=wanted.force
        )
        return self.begin(job)

    def begin(self, adding: AddAdapterJob) -> AddAdapterJob:
        """Start a job that was checked."""
        self.jobs[adding] = task = asyncio.create_task(self._add(adding))
        task.add_done_callback(lambda _: self._left(adding))
        return adding

    async def split(self, key: Key, weights: Mapping[str, float]) -> Alias:
        """Split a name over the versions ``v1`` and so on, by weight.

        Raises :class:`AdapterUnknown`, :class:`TargetError` (version) and :class:`ConfigError` (weights).
        """
        await self._known(key)
        numbers = weights_by_number(weights)
        return await self._write(lambda: self._store.names.split(*key, numbers))

    async def rollback(self, key: Key, to: str | None = None) -> Alias:
        """Return a name to its previous split, or to the version ``to`` alone.

        Raises :class:`AdapterUnknown`, :class:`TargetError` if there is none, :class:`ConfigError` (version).
        """
        await self._known(key)
        number = None
        if to is not None:
            if (match := _VERSION.fullmatch(to)) is None:
                raise ConfigError("to", to, "a version such as v1")
            number = int(match[1])
        return await self._write(lambda: self._store.names.rollback(*key, number))

    async def remove(self, key: Key) -> None:
        """Remove a name and revoke its jobs; raises :class:`AdapterUnknown` if there is none."""
        await self.read()
        async with self._writing:
            coming = [each for each in self.jobs if each.key == key and not each.done.is_set()]
            if self.catalog.get(key) is not None:
                await run_in_thread(lambda: self._store.names.remove(*key), "adapters-write")
                self.catalog.drop(key)
            elif not coming:
                raise _unknown(key)
            for adding in coming:
                adding.revoke()
                # Its thread may wait for a source for long; another job of the name does not wait for it.
                self.jobs[adding].cancel()
        log.info("adapter %s on %s: removed", key[1], key[0])

    async def declared(self) -> dict[Key, dict[str, str]]:
        """The names that the deployment file declared: the digests of their sources, by identity."""
        return await run_in_thread(self._store.names.declared, "adapters-read")

    def specs(self) -> tuple[ModelSpec, ...]:
        """The models with an `adapters` section."""
        return tuple(self._specs.values())

    async def refusals(self, spec: ModelSpec, former: str) -> dict[str, str]:
        """Why stored versions of a model do not fit its base model, by digest; it was ``former`` before."""
        digests = {version.digest for alias in self.catalog.of(spec.name) for version in alias.versions}
        refused = tuple(self.unfit.get(spec.name, ()))
        return await run_in_thread(
            lambda: self._store.refusals(spec, digests, former, refused), "adapters-check"
        )

    async def missing(self, digests: Collection[str]) -> set[str]:
        """Those of ``digests`` whose files are not stored, or were found damaged."""
        return await run_in_thread(lambda: self._store.missing(digests), "adapters-look")

    async def tar(self, digest: str) -> Iterator[bytes] | None:
        """The files of a version as a tar, for other nodes; ``None`` if there are none."""
        await self.read()
        if not self._opened.is_set():
            return None
        return await run_in_thread(lambda: self._store.tar(digest), "adapters-read")

    async def clear(self, in_use: Collection[str]) -> None:
        """Delete files that no record names and that are not among the serving names ``in_use``.

        Nothing is deleted while a job runs, as it may be about to name files that are unused so far.
        """
        async with self._writing:
            if not self.jobs and self._opened.is_set():
                gone = await run_in_thread(lambda: self._store.clear(in_use, GRACE_S), "adapters-clear")
                for digest in gone:
                    log.info("%s: deleted, as no record names it", digest[:12])

    def _read(self) -> tuple[AdapterStore, tuple[Alias, ...]]:
        store = self._open_store()
        return store, store.aliases()

    async def _add(self, adding: AddAdapterJob) -> None:
        model, name = adding.key
        try:
            async with self._turns[adding.key], self._slots[adding.remote]:
                adding.check()
                # The files to delete were chosen before this job started.
                async with self._writing:
                    pass
                alias = await self._import(adding)
        except TidegateError as error:
            log.warning("adapter %s on %s: %s", name, model, error)
            adding.fail(error)
        except asyncio.CancelledError:
            adding.fail(Unreachable("the controller is ending"))
            raise
        except Exception as error:
            log.exception("adapter %s on %s", name, model)
            adding.fail(TidegateError(f"{type(error).__name__}: {error}"))
        else:
            adding.succeed(alias)

    async def _import(self, adding: AddAdapterJob) -> Alias:
        model, name = adding.key
        await self._opened.wait()
        spec = self._specs.get(model)
        if spec is None:
            raise TargetError(f"{model} takes no adapters any more")

        fetched: list[str] = []

        def take(source: str, weight: float) -> NewVersion:
            known = adding.known.get(source)
            taken = self._store.stored(known) if known else None
            if taken is None:
                taken = self._store.take(
                    spec, source, adding.report, declared=adding.declared, any_base=adding.any_base
                )
                fetched.append(taken.digest)
            return taken._replace(weight=weight, identity=self._store.identity(source))

        versions = await run_in_thread(lambda: [take(*part) for part in adding.parts], f"adapter-{name}")
        if self._specs.get(model, spec).source != spec.source:
            raise TargetError(f"{model} got another base model while {name} was added")
        adding.report(ProgressLine(step="record", message=f"recording the versions of {name}"))
        before = self.catalog.get(adding.key)
        alias = await self._write(
            lambda: self._store.put(
                adding.key, versions, adding.tenants, declared=adding.declared, percent=adding.percent
            ),
            adding,
        )
        for digest in fetched:
            self.unfit.get(model, {}).pop(digest, None)
        if alias != before:
            digests = ", ".join(version.digest[:12] for version in versions)
            log.info("adapter %s on %s: versions %s", name, model, digests)
        return alias

    async def _write(self, change: Callable[[], Alias], adding: AddAdapterJob | None = None) -> Alias:
        """Carry out one transaction and publish its result, in the order of the transactions."""
        async with self._writing:
            if adding is not None:
                adding.check()
            alias = await run_in_thread(change, "adapters-write")
            self.catalog.put(alias)
        return alias

    def _left(self, adding: AddAdapterJob) -> None:
        del self.jobs[adding]
        if not any(other.key == adding.key for other in self.jobs):
            self._turns.pop(adding.key, None)

    def _model(self, model: str | None) -> str:
        """The model to use; raises :class:`TargetError` if it has no `adapters` section."""
        if not self._specs:
            raise TargetError("no model takes adapters: expected one with an `adapters` section")
        known = ", ".join(self._specs)
        if model is None and len(self._specs) > 1:
            raise TargetError(f"model: got none, expected one of {known}")
        chosen = next(iter(self._specs)) if model is None else model
        if chosen not in self._specs:
            raise TargetError(f"model: got {chosen[:200]!r}, expected one that takes adapters: {known}")
        return chosen

    async def _known(self, key: Key) -> None:
        await self.read()
        if self.catalog.get(key) is None:
            raise _unknown(key)


def _unknown(key: Key) -> AdapterUnknown:
    return AdapterUnknown(f"there is no adapter {key[1][:200]!r} on {key[0][:200]!r}")


def check_add(request: AddAdapterRequest, models: Collection[str], tenants: Collection[str]) -> None:
    """Raise :class:`AdapterRefused` for an invalid name, :class:`ConfigError` for another invalid value."""
    if NAME.fullmatch(request.name) is None:
        expected = f"expected a name that matches {NAME.pattern}"
        raise AdapterRefused("name", f"name: got {request.name[:200]!r}, {expected}")
    if request.name in models:
        raise AdapterRefused("name", f"name: got {request.name!r}, expected a name that no model has")
    if not request.source:
        raise ConfigError("source", request.source, "a path, https://, hf:ORG/NAME or another URL")
    for tenant in request.tenants or ():
        if tenant not in tenants:
            known = ", ".join(tenants) or "none, for the document has no tenants"
            raise ConfigError("tenants", tenant, f"one of the document's tenants: {known}")


def weights_by_number(weights: Mapping[str, float]) -> dict[int, float]:
    """The weights by version number, from keys such as ``v1``; raises :class:`ConfigError` if invalid."""
    numbers = {}
    for version, weight in weights.items():
        if (match := _VERSION.fullmatch(version)) is None or not 0 <= weight < float("inf"):
            raise ConfigError("split", {version: weight}, "versions such as v1, each with a weight from 0")
        numbers[int(match[1])] = weight
    if not any(numbers.values()):
        raise ConfigError("split", dict(weights), "at least one weight above 0")
    return numbers
