"""Load and unload the adapters of one engine, by the rules of :mod:`policy.adapter_placement.slots`.

A request leases its adapter from before the engine sees it until the engine has finished it. One task loads
and unloads, one adapter at a time. Files are fetched and read concurrently, before the load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policy.adapter_placement.slots import PREFETCH_PAUSE, AdapterSlots, SlotEntry, SlotState
from policy.errors import AdapterRefused, EngineFailed
from policy.stats.backoff import Backoff
from policy.wire.heartbeat import AdapterRef, AdapterUse
from serve.async_waiting import wait_at_most
from serve.engine.adapters.files import AdapterFileCache
from serve.engine.adapters.usage_accumulator import AdapterUsageAccumulator
from serve.engine.interface import Engine

# How often the slots are compared with the engine, and failed prefetches are tried again.
CHECK_S = 10.0
# Pause after a failed load, so that not every request for a broken adapter tries to load it again.
BACKOFF = Backoff(5.0, 300.0)
# Failures that are kept; beyond that the oldest is dropped.
MAX_KEPT = 1024

log = logging.getLogger("tidegate.adapters")


@dataclass(frozen=True, slots=True)
class LocalAdapterFiles:
    """The files of one adapter in the directory ``path``; fetching them took ``fetch_s`` seconds."""

    path: Path
    fetch_s: float


Entry = SlotEntry[AdapterRef, "asyncio.Future[float]", LocalAdapterFiles]
Slots = AdapterSlots[AdapterRef, "asyncio.Future[float]", LocalAdapterFiles]


@dataclass(slots=True)
class _Failure:
    error: AdapterRefused
    attempts: int
    until: float


class AdapterLoadFailures:
    """The failures by serving name. Instants are seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._kept: dict[str, _Failure] = {}

    def add(self, served: str, error: AdapterRefused, now: float) -> None:
        """Record a failure: no retry for 5 s, twice as long after each further failure in a row."""
        attempts = 1
        if (last := self._kept.pop(served, None)) is not None:
            attempts += last.attempts
        self._kept[served] = _Failure(error, attempts, now + BACKOFF.delay_s(attempts))
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def standing(self, served: str, now: float) -> AdapterRefused | None:
        """A new error that says why ``served`` is not retried yet; ``None`` when it may be."""
        failure = self._kept.get(served)
        if failure is None or now >= failure.until:
            return None
        return AdapterRefused(failure.error.code, str(failure.error))

    def forget(self, served: str) -> None:
        """It was loaded; the next failure is the first of a row."""
        self._kept.pop(served, None)

    def names(self, now: float) -> tuple[str, ...]:
        """Serving names that are not retried yet. Also drops failures that expired long ago."""
        for served in [s for s, failure in self._kept.items() if now > failure.until + BACKOFF.max_s]:
            del self._kept[served]
        return tuple(served for served, failure in self._kept.items() if now < failure.until)


class AdapterLoader:
    """The adapters of one engine. Nothing is loaded unless :meth:`run` runs.

    ``engine`` is the lock to hold while no adapter may be loaded or unloaded.
    """

    def __init__(
        self,
        engine: Engine,
        files: AdapterFileCache,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine = engine
        self._files = files
        self._clock = clock
        self._sleep = sleep
        self._slots: Slots = AdapterSlots(engine.adapter_slots)
        self._failures = AdapterLoadFailures()
        self._usage = AdapterUsageAccumulator()
        self._fetches: dict[Entry, asyncio.Task[None]] = {}
        self._prefetching: Entry | None = None
        self._prefetch_at = 0.0
        self._wake = asyncio.Event()
        self.engine = asyncio.Lock()
        self._settled = asyncio.Event()
        self._changed: Callable[[], None] = lambda: None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever the loaded or the refused adapters have changed."""
        self._changed = changed

    def refused(self) -> tuple[str, ...]:
        """Serving names whose load failed and is not tried again yet."""
        return self._failures.names(self._clock())

    def uses(self) -> tuple[AdapterUse, ...]:
        """The usage of each adapter since the last call, with the requests that wait for a slot now."""
        for entry in self._slots.queued():
            if entry.files is not None:
                self._count(entry.adapter, waiting=len(entry.waiting))
        uses = self._usage.pending()
        self._usage.clear()
        return uses

    def hold(self, planned: Sequence[AdapterRef]) -> None:
        """Prefer these adapters, the most valuable first, and load them ahead of requests."""
        self._slots.plan(planned[: self._slots.capacity])
        self._wake_loader()

    async def settled(self) -> None:
        """Return when every planned adapter is loaded or refused, as far as there are slots."""
        await self._settled.wait()

    @contextlib.contextmanager
    def lease(self, name: str, digest: str) -> Iterator[asyncio.Future[float] | None]:
        """A request uses version ``digest`` of ``name`` within the block.

        Gives ``None`` if the engine may see the request at once. Otherwise the future resolves to the instant
        when it may, or raises :class:`policy.errors.AdapterRefused` or :class:`policy.errors.EngineFailed`.
        Raises AdapterRefused if the adapter's last load failed a short time ago, or if there are no slots.
        """
        now, ref = self._clock(), AdapterRef(name=name, digest=digest)
        known = self._slots.get(ref)
        loaded = known is not None and known.state is SlotState.LOADED
        self._count(ref, requests=1, found=int(loaded))
        if not self._slots.capacity:
            raise AdapterRefused("no_slots", "this replica loads no adapters")
        if (refusal := self._failures.standing(ref.served, now)) is not None:
            raise refusal
        entry = self._slots.track(ref)
        arrival: asyncio.Future[float] | None = None
        if not self._slots.claim(entry, now):
            arrival = asyncio.get_running_loop().create_future()
            self._slots.wait(entry, arrival, now)
            if entry.state is SlotState.ABSENT:
                self._fetch(entry)
            self._wake_loader()
        try:
            yield arrival
        finally:
            if arrival is not None:
                arrival.cancel()
            if arrival is not None and (arrival.cancelled() or arrival.exception() is not None):
                self._slots.drop(entry, arrival)
            else:
                self._slots.release(entry)
                began = now if arrival is None else arrival.result()
                self._count(ref, busy_s=self._clock() - began)
            self._prune(entry)

    async def run(self) -> None:
        """Load and unload until cancelled; raises :class:`policy.errors.EngineFailed`."""
        checked = self._clock()
        try:
            while True:
                self._wake.clear()
                async with self.engine:
                    now = self._clock()
                    for entry in self._slots.admissible(now):
                        self._admit(entry)
                    pause_s = self._prefetch_at - now
                    step = self._slots.next(now)
                    if step is not None and (step[0].waiting or pause_s <= 0):
                        await self._load(*step)
                        checked = self._clock()
                        continue
                    if now - checked >= CHECK_S:
                        await self._reconcile()
                        checked = now
                        continue
                if pause_s <= 0:
                    self._prefetch(now)
                    if not self._fetches:
                        self._settled.set()
                await wait_at_most(self._wake, pause_s if pause_s > 0 else CHECK_S)
        finally:
            for task in self._fetches.values():
                task.cancel()
            for entry in self._slots:
                self._reject(entry, lambda: EngineFailed("the engine ended"))

    async def _load(self, entry: Entry, victim: Entry | None) -> None:
        if victim is not None:
            await self._unload(victim)
        self._slots.set_state(entry, SlotState.LOADING)
        assert entry.files is not None
        began = self._clock()
        try:
            await self._engine.load(entry.adapter.served, entry.files.path)
        except AdapterRefused as error:
            self._slots.set_state(entry, SlotState.ABSENT)
            self._fail(entry, error)
            load_s = self._clock() - began
        else:
            self._slots.set_state(entry, SlotState.LOADED)
            load_s = self._clock() - began
            entry.load_s += load_s
            self._failures.forget(entry.adapter.served)
            self._count(entry.adapter, loads=1, load_s=entry.files.fetch_s + entry.load_s)
            # Requests that waited for this load use it even if others have waited longer for a slot.
            self._admit(entry)
            self._changed()
        # An engine evicts by itself only while it loads.
        await self._reconcile()
        if self._engine.stats().running:
            # Running requests get as much time as the load took, and more before a prefetch.
            self._prefetch_at = max(self._prefetch_at, self._clock() + PREFETCH_PAUSE * load_s)
            await self._sleep(load_s)

    async def _unload(self, victim: Entry) -> None:
        self._slots.set_state(victim, SlotState.UNLOADING)
        self._changed()
        await self._engine.unload(victim.adapter.served)
        self._slots.set_state(victim, SlotState.ABSENT)
        victim.files = None
        if victim.waiting:
            self._fetch(victim)
        self._slots.prune(victim)

    async def _reconcile(self) -> None:
        """Follow what the engine evicted by itself; an adapter that requests use is loaded again."""
        if not self._slots.capacity:
            return
        actual = await self._engine.loaded()
        expected = {entry.adapter.served: entry for entry in self._slots if entry.state is SlotState.LOADED}
        for served in actual - expected.keys():
            await self._engine.unload(served)
        for served in expected.keys() - actual:
            entry = expected[served]
            log.warning("%s: the engine has evicted it", served)
            if not entry.users:
                await self._unload(entry)
                continue
            assert entry.files is not None
            try:
                await self._engine.load(served, entry.files.path)
            except AdapterRefused as error:
                log.warning("%s: %s: %s", served, error.code, error)

    def _admit(self, entry: Entry) -> None:
        """Let all that wait for the loaded ``entry`` use it."""
        now = self._clock()
        for arrival in self._slots.admit(entry):
            if arrival.done():
                self._slots.release(entry)
            else:
                arrival.set_result(now)

    def _prefetch(self, now: float) -> None:
        """Fetch the files of the next planned adapter that is not loaded, one adapter at a time."""
        if self._prefetching is not None:
            return
        for entry in self._slots.prefetchable(now):
            if entry.files is None and self._failures.standing(entry.adapter.served, now) is None:
                self._prefetching = entry
                self._fetch(entry)
                return

    def _fetch(self, entry: Entry) -> None:
        if entry.files is None and entry not in self._fetches:
            self._fetches[entry] = asyncio.create_task(self._fetched(entry))

    async def _fetched(self, entry: Entry) -> None:
        began = self._clock()
        used = [*self._fetches, *(each for each in self._slots if each.files is not None)]
        self._files.retain({each.adapter.digest for each in used})
        try:
            path = await self._files.fetch(entry.adapter.digest)
            found = self._clock()
            await self._files.warm(path)
        except AdapterRefused as error:
            self._fail(entry, error)
        except Exception as error:
            # An unforeseen error of one adapter's files must not end the loader.
            log.exception("%s: fetching its files failed", entry.adapter.served)
            self._fail(entry, AdapterRefused("files_missing", repr(error)))
        else:
            entry.files = LocalAdapterFiles(path, found - began)
            entry.load_s = self._clock() - found
        finally:
            del self._fetches[entry]
            if self._prefetching is entry:
                self._prefetching = None
            self._prune(entry)

    def _fail(self, entry: Entry, error: AdapterRefused) -> None:
        served = entry.adapter.served
        log.warning("%s: %s: %s", served, error.code, error)
        entry.files = None
        self._failures.add(served, error, self._clock())
        self._count(entry.adapter, failed=f"{error.code}: {error}")
        self._reject(entry, lambda: AdapterRefused(error.code, str(error)))
        self._slots.prune(entry)
        self._changed()

    def _reject(self, entry: Entry, error: Callable[[], Exception]) -> None:
        for arrival in self._slots.reject(entry):
            if not arrival.done():
                arrival.set_exception(error())

    def _count(self, ref: AdapterRef, **counts: Any) -> None:
        self._usage.add(AdapterUse(name=ref.name, digest=ref.digest, **counts))

    def _prune(self, entry: Entry) -> None:
        if entry not in self._fetches:
            self._slots.prune(entry)
        self._wake_loader()

    def _wake_loader(self) -> None:
        self._settled.clear()
        self._wake.set()
