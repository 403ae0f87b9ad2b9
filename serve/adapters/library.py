"""The adapter library of the controller: adds adapters, publishes the catalog, deletes unused files.

What is published or acknowledged is durable. Files are stored before a record names them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from policy.config.deployment import Deployment, ModelSpec
from policy.errors import AdapterRefused, AdapterUnknown, ConfigError, TargetError, TidegateError, Unreachable
from policy.stats.backoff import Backoff
from policy.wire.catalog import NAME, Alias
from policy.wire.controller import AddRequest
from serve.adapters.add_job import AddJob, ImportedAdapter, Key
from serve.adapters.catalog import CatalogPublisher
from serve.threads import run_in_thread
from store.preparation_progress import Progress

if TYPE_CHECKING:
    from serve.adapters.adapter_store import AdapterStore  # imports the database, which takes long

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


class AdapterLibrary:
    """The adapters of all models; for one event loop, with blocking work in threads.

    The store is made by ``shelf`` when the first model has an `adapters` section.
    """

    def __init__(self, shelf: Callable[[], AdapterStore], epoch: float, event: Event) -> None:
        self._make = shelf
        self._shelf: AdapterStore
        self._event = event
        self._published = CatalogPublisher(epoch)
        self._specs: dict[str, ModelSpec] = {}
        self._names: frozenset[str] = frozenset()
        self._tenants: tuple[str, ...] = ()
        self._opened = asyncio.Event()
        self._turns: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)
        # One for remote sources, one for local ones.
        self._few = {remote: asyncio.Semaphore(ADDS_AT_ONCE) for remote in (False, True)}
        self._writing = asyncio.Lock()
        self._adding: dict[AddJob, asyncio.Task[None]] = {}

    def declare(self, deployment: Deployment) -> None:
        """Set the models with an `adapters` section, and the tenants."""
        self._names = frozenset(spec.name for spec in deployment.models)
        self._specs = {spec.name: spec for spec in deployment.models if spec.adapters and spec.modes}
        self._tenants = tuple(tenant.name for tenant in deployment.tenants)
        self._published.serve(self._specs)

    async def open(self) -> None:
        """Return once the records are read; they are read when a model has an `adapters` section."""
        failures = 0
        while not self._opened.is_set():
            if not self._specs:
                await self._published.revision.changed()
                continue
            try:
                self._shelf, found = await run_in_thread(self._first_look, "adapters-open")
            except (TidegateError, OSError) as error:
                self._event(f"adapters: {error}")
                failures += 1
                await asyncio.sleep(RETRY.delay_s(failures))
                continue
            self._published.fill(found)
            self._opened.set()

    async def read(self) -> None:
        """Return once the records are read, if needed; may raise :class:`Unreachable`."""
        if self._specs:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._opened.wait()
            except TimeoutError:
                raise Unreachable("the records of adapters cannot be read yet") from None

    @property
    def models(self) -> tuple[str, ...]:
        """The models with an `adapters` section."""
        return self._published.models

    def aliases(self, model: str) -> list[Alias]:
        """The aliases on ``model``."""
        return self._published.of(model)

    def alias(self, key: Key) -> Alias | None:
        """The alias of one name, if there is one."""
        return self._published.get(key)

    def adding(self) -> tuple[AddJob, ...]:
        """The jobs that run or wait."""
        return tuple(self._adding)

    def fetching(self) -> dict[Key, str]:
        """A progress message for each name that is being added; for several jobs of one name, the first."""
        waited_for = [adding for adding in self._adding if not adding.done.is_set()]
        return {adding.key: adding.line.message for adding in reversed(waited_for)}

    # Published catalog.

    async def line(self) -> tuple[int, bytes]:
        """The version of the catalog and the catalog as a JSON line, once the records are read."""
        while self._specs and not self._opened.is_set():
            await self._opened.wait()
        return self._published.line()

    async def wait(self, version: int, timeout_s: float) -> None:
        """Return when the catalog is past ``version``, or after ``timeout_s``."""
        await self._published.revision.past(version, timeout_s)

    # Requests of users.

    def add(self, wanted: AddRequest) -> AddJob:
        """Begin to add or replace an adapter.

        Raises :class:`TargetError` if the model has no `adapters` section, and as :func:`check_add`.
        """
        model = self._model(wanted.model)
        check_add(wanted, self._names, self._tenants)
        return self.begin(AddJob((model, wanted.name), ((wanted.source, 1.0),), wanted.tenants))

    def begin(self, adding: AddJob) -> AddJob:
        """Start a job that was checked."""
        self._adding[adding] = task = asyncio.create_task(self._add(adding))
        task.add_done_callback(lambda _: self._left(adding))
        return adding

    async def split(self, key: Key, weights: Mapping[str, float]) -> Alias:
        """Split a name over the versions ``v1`` and so on, by weight.

        Raises :class:`AdapterUnknown` for an unknown name, :class:`TargetError` for an unknown version, and
        :class:`policy.errors.ConfigError` for invalid weights.
        """
        await self._known(key)
        numbers = weights_by_number(weights)
        return await self._write(lambda: self._shelf.split(*key, numbers))

    async def rollback(self, key: Key) -> Alias:
        """Return a name to its former split.

        Raises :class:`AdapterUnknown`, and :class:`TargetError` if there is no former split.
        """
        await self._known(key)
        return await self._write(lambda: self._shelf.rollback(*key))

    async def remove(self, key: Key) -> None:
        """Remove a name and revoke its jobs; raises :class:`AdapterUnknown` if there is none."""
        await self.read()
        async with self._writing:
            coming = [each for each in self._adding if each.key == key and not each.done.is_set()]
            if self._published.get(key) is not None:
                await run_in_thread(lambda: self._shelf.remove(*key), "adapters-write")
                self._published.drop(key)
            elif not coming:
                raise _unknown(key)
            for adding in coming:
                adding.revoke()
        log.info("adapter %s on %s: removed", key[1], key[0])

    def redacted(self, source: str) -> str:
        """``source`` as it is recorded, without secrets."""
        return self._shelf.redacted(source)

    async def declared(self) -> set[Key]:
        """The names that the deployment file declared."""
        return await run_in_thread(self._shelf.declared, "adapters-read")

    async def tar(self, digest: str) -> Iterator[bytes] | None:
        """The files of a version as a tar, for other nodes; ``None`` if there are none."""
        await self.read()
        if not self._opened.is_set():
            return None
        return await run_in_thread(lambda: self._shelf.tar(digest), "adapters-read")

    async def clear(self, in_use: Collection[str]) -> None:
        """Delete files that no record names and that are not among the serving names ``in_use``.

        Nothing is deleted while a job runs, as it may be about to name files that are unused so far.
        """
        async with self._writing:
            if not self._adding and self._opened.is_set():
                gone = await run_in_thread(lambda: self._shelf.clear(in_use, GRACE_S), "adapters-clear")
                for digest in gone:
                    log.info("%s: deleted, for nothing names it", digest[:12])

    def _first_look(self) -> tuple[AdapterStore, tuple[Alias, ...]]:
        shelf = self._make()
        return shelf, shelf.aliases()

    async def _add(self, adding: AddJob) -> None:
        model, name = adding.key
        try:
            async with self._turns[adding.key], self._few[adding.remote]:
                adding.check()
                # The files to delete were chosen before this job started.
                async with self._writing:
                    pass
                alias = await self._carried_out(adding)
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

    async def _carried_out(self, adding: AddJob) -> Alias:
        model, name = adding.key
        await self._opened.wait()
        spec = self._specs.get(model)
        if spec is None:
            raise TargetError(f"{model} takes no adapters any more")

        def take() -> list[tuple[ImportedAdapter, float]]:
            return [(self._one(spec, source, adding), weight) for source, weight in adding.parts]

        parts = await run_in_thread(take, f"adapter-{name}")
        adding.report(Progress(step="record", message=f"writing down what {name} stands for"))
        before = self._published.get(adding.key)
        alias = await self._write(
            lambda: self._shelf.put(adding.key, parts, adding.tenants, declared=adding.declared), adding
        )
        if alias != before:
            said = ", ".join(taken.digest[:12] for taken, _ in parts)
            log.info("adapter %s on %s: stands for %s", name, model, said)
        return alias

    def _one(self, spec: ModelSpec, source: str, adding: AddJob) -> ImportedAdapter:
        before = adding.known.get(source)
        if before is not None and self._shelf.holds(before.digest):
            return before
        return self._shelf.take(spec, source, adding.report)

    async def _write(self, change: Callable[[], Alias], adding: AddJob | None = None) -> Alias:
        """Carry out one transaction and publish its result, in the order of the transactions."""
        async with self._writing:
            if adding is not None:
                adding.check()
            alias = await run_in_thread(change, "adapters-write")
            self._published.put(alias)
        return alias

    def _left(self, adding: AddJob) -> None:
        del self._adding[adding]
        if not any(other.key == adding.key for other in self._adding):
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
        if self._published.get(key) is None:
            raise _unknown(key)


def _unknown(key: Key) -> AdapterUnknown:
    return AdapterUnknown(f"there is no adapter {key[1][:200]!r} on {key[0][:200]!r}")


def check_add(request: AddRequest, models: Collection[str], tenants: Collection[str]) -> None:
    """Validate a request to add an adapter, given the deployment's ``models`` and ``tenants``.

    Raises :class:`AdapterRefused` for an invalid name, and :class:`ConfigError` for any other invalid value.
    """
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
