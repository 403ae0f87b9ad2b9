"""The controller's adapters: adds them, publishes what names stand for, and clears away what nobody names.

What is published or acknowledged is durable, and what is recorded lies in its place.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from policy.config.deployment import Deployment, ModelSpec
from policy.errors import AdapterRefused, AdapterUnknown, ConfigError, TargetError, TidegateError, Unreachable
from policy.stats.backoff import Backoff
from policy.wire.catalog import NAME, Alias
from policy.wire.controller import AddRequest
from serve.adapters.add_job import AddJob, Key
from serve.adapters.catalog import CatalogPublisher
from serve.adapters.store_port import AdapterStore, ImportedAdapter
from serve.threads import run_in_thread
from store.progress import Progress

log = logging.getLogger("tidegate.adapters")

# Those from other machines, and as many from this one: a slow server holds up none of these.
ADDS_AT_ONCE = 4
# What nobody names is kept for so long: a replica may just be pulling it, a gateway may not know yet.
GRACE_S = 600.0
RETRY = Backoff(1.0, 60.0)
# Somebody who asks waits so long for a controller that is just starting.
PATIENCE_S = 5.0

Event = Callable[[str], None]
_VERSION = re.compile(r"v([1-9][0-9]{0,8})")


class AdapterLibrary:
    """Which adapters there are; for one event loop, its slow work is done in threads.

    ``shelf`` is made when a model takes adapters, and until then costs nothing.
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
        # By whether they are remote.
        self._few = {remote: asyncio.Semaphore(ADDS_AT_ONCE) for remote in (False, True)}
        self._writing = asyncio.Lock()
        self._adding: dict[AddJob, asyncio.Task[None]] = {}

    def declare(self, deployment: Deployment) -> None:
        """Take from a document which models take adapters, and who there is to see them."""
        self._names = frozenset(spec.name for spec in deployment.models)
        self._specs = {spec.name: spec for spec in deployment.models if spec.adapters and spec.modes}
        self._tenants = tuple(tenant.name for tenant in deployment.tenants)
        self._published.serve(self._specs)

    async def open(self) -> None:
        """Return once the records are read, which is when there is a model that takes adapters."""
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
        """Return once the records are read, if any are needed; raises :class:`Unreachable` after a while."""
        if self._specs:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._opened.wait()
            except TimeoutError:
                raise Unreachable("the records of adapters cannot be read yet") from None

    @property
    def models(self) -> tuple[str, ...]:
        """The models that take adapters."""
        return self._published.models

    def aliases(self, model: str) -> list[Alias]:
        """What the names on ``model`` stand for."""
        return self._published.of(model)

    def alias(self, key: Key) -> Alias | None:
        """What one name stands for."""
        return self._published.get(key)

    def adding(self) -> tuple[AddJob, ...]:
        """What is being added now, or waits for its turn."""
        return tuple(self._adding)

    def fetching(self) -> dict[Key, str]:
        """How far each name is that somebody waits for; of several for one name the first."""
        waited_for = [adding for adding in self._adding if not adding.done.is_set()]
        return {adding.key: adding.line.message for adding in reversed(waited_for)}

    # What is published.

    async def line(self) -> tuple[int, bytes]:
        """The version of the catalog and the catalog as a line of JSON, once there is anything to say."""
        while self._specs and not self._opened.is_set():
            await self._opened.wait()
        return self._published.line()

    async def wait(self, version: int, timeout_s: float) -> None:
        """Return when the catalog is past ``version``, or after ``timeout_s``."""
        await self._published.revision.past(version, timeout_s)

    # What people ask for.

    def add(self, wanted: AddRequest) -> AddJob:
        """Begin to add or replace an adapter.

        Raises :class:`TargetError` where no model, or not that one, takes adapters, and as
        :func:`check_add` does.
        """
        model = self._model(wanted.model)
        check_add(wanted, self._names, self._tenants)
        return self.begin(AddJob((model, wanted.name), ((wanted.source, 1.0),), wanted.tenants))

    def begin(self, adding: AddJob) -> AddJob:
        """Begin to add what was checked."""
        self._adding[adding] = task = asyncio.create_task(self._add(adding))
        task.add_done_callback(lambda _: self._left(adding))
        return adding

    async def split(self, key: Key, weights: Mapping[str, float]) -> Alias:
        """Let a name stand for the versions ``v1`` and so on by weight.

        Raises :class:`AdapterUnknown` for a name that there is not, :class:`TargetError` for such a version,
        :class:`policy.errors.ConfigError` for weights that are none.
        """
        await self._known(key)
        numbers = weights_by_number(weights)
        return await self._write(lambda: self._shelf.split(*key, numbers))

    async def rollback(self, key: Key) -> Alias:
        """Let a name stand for what it stood for before.

        Raises :class:`AdapterUnknown`, and :class:`TargetError` where there was nothing before.
        """
        await self._known(key)
        return await self._write(lambda: self._shelf.rollback(*key))

    async def remove(self, key: Key) -> None:
        """Forget a name, also what is on its way to it; raises :class:`AdapterUnknown` if there is none."""
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

    def told(self, source: str) -> str:
        """``source`` as versions record it."""
        return self._shelf.told(source)

    async def declared(self) -> set[Key]:
        """The names that a document brought."""
        return await run_in_thread(self._shelf.declared, "adapters-read")

    async def tar(self, digest: str) -> Iterator[bytes] | None:
        """The files of a version, for other nodes; ``None`` where there is none."""
        await self.read()
        if not self._opened.is_set():
            return None
        return await run_in_thread(lambda: self._shelf.tar(digest), "adapters-read")

    async def clear(self, in_use: Collection[str]) -> None:
        """Delete what no record names, and no replica has or should have by the serving names ``in_use``.

        Not while something is added: that may be about to name what nobody does yet.
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
                # What is being cleared away was chosen before this began.
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
        """Carry out one transaction and publish what came of it, in the order of the transactions."""
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
        """The model that is meant; raises :class:`TargetError` where that takes no adapters."""
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
