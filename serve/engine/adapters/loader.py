"""A replica's adapters: loaded once however many requests wait, and unloaded when no request uses them.

Requests hold a :class:`serve.engine.adapters.lease.AdapterLease` from before the engine sees them until it is
done with them. One task loads and unloads, one adapter at a time; files are fetched and read before, beside
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from policy.errors import AdapterRefused, EngineFailed
from policy.wire.catalog import served_name
from policy.wire.heartbeat import AdapterRef, AdapterUse
from serve.engine.adapters.lease import AdapterLease
from serve.engine.adapters.load_failures import LoadFailures
from serve.engine.adapters.slots import AdapterSlot, Slots, SlotState
from serve.engine.adapters.usage import AdapterUsage
from serve.engine.port import Engine

# The books are compared with the engine, and what failed is prefetched again, so often.
CHECK_S = 10.0
# Between two prefetches pass so many times the seconds that the first took.
PREFETCH_PAUSE = 4.0

log = logging.getLogger("tidegate.adapters")


class AdapterFiles(Protocol):
    """Where the files are; see :class:`serve.engine.adapters.files.AdapterFileCache`."""

    async def fetch(self, digest: str) -> Path:
        """The directory of the adapter; raises :class:`policy.errors.AdapterRefused`."""
        ...

    async def warm(self, path: Path) -> None:
        """Read the files into memory; raises :class:`policy.errors.AdapterRefused`."""
        ...


class AdapterLoader:
    """The slots of one engine. :meth:`run` must run for anything to be loaded."""

    def __init__(
        self,
        engine: Engine,
        files: AdapterFiles,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine = engine
        self._files = files
        self._clock = clock
        self._sleep = sleep
        self._slots = Slots(engine.adapter_slots)
        self._failures = LoadFailures()
        self._uses = AdapterUsage()
        self._fetches: dict[AdapterSlot, asyncio.Task[None]] = {}
        self._ahead: AdapterSlot | None = None
        self._prefetch_at = 0.0
        self._wake = asyncio.Event()
        # Held by whoever needs that nothing is loaded or unloaded.
        self.engine = asyncio.Lock()
        self._settled = asyncio.Event()
        self._changed: Callable[[], None] = lambda: None

    def watch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` whenever what is loaded or refused has changed."""
        self._changed = changed

    def refused(self) -> tuple[str, ...]:
        """Serving names whose load failed and is not tried again yet."""
        return self._failures.names(self._clock())

    def uses(self) -> tuple[AdapterUse, ...]:
        """What was done with each adapter since the last call, and how many requests wait for a slot now."""
        for adapter in self._slots.asked_for():
            if adapter.path is not None:
                self._uses.add(adapter.name, adapter.digest, waiting=len(adapter.waiting))
        return self._uses.take()

    def hold(self, wanted: Sequence[AdapterRef]) -> None:
        """Keep these loaded rather than others, and load them ahead of requests, in this order."""
        self._slots.hold(wanted[: self._slots.capacity])
        self._stir()

    async def settled(self) -> None:
        """Return when everything that is held has been loaded or refused, as far as there is room."""
        await self._settled.wait()

    def claim(self, name: str, digest: str) -> AdapterLease:
        """A part in version ``digest`` of ``name``, which must be released.

        Raises :class:`policy.errors.AdapterRefused` when its load failed lately, or nothing is loaded here.
        """
        now, served = self._clock(), served_name(name, digest)
        known = self._slots.get(served)
        here = known is not None and known.state is SlotState.LOADED
        self._uses.add(name, digest, requests=1, found=int(here))
        if not self._slots.capacity:
            raise AdapterRefused("no_slots", "this replica loads no adapters")
        if (refused := self._failures.standing(served, now)) is not None:
            raise refused
        adapter = self._slots.enter(AdapterRef(name=name, digest=digest))
        adapter.rate.add(now)
        if here and not self._slots.yields(adapter, now):
            adapter.users += 1
            return AdapterLease(adapter, None, now, self._left)
        if not adapter.waiting:
            adapter.since = now
        arrival: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        adapter.waiting[arrival] = None
        if adapter.state is SlotState.WANTED:
            self._fetch(adapter)
        self._stir()
        return AdapterLease(adapter, arrival, now, self._left)

    async def run(self) -> None:
        """Load and unload until cancelled; raises :class:`policy.errors.EngineFailed`."""
        checked = self._clock()
        try:
            while True:
                self._wake.clear()
                async with self.engine:
                    self._admit()
                    now = self._clock()
                    pause_s = self._prefetch_at - now
                    step = self._slots.next(now)
                    if step is not None and (step[0].waiting or pause_s <= 0):
                        await self._bring(*step)
                        checked = self._clock()
                        continue
                    if now - checked >= CHECK_S:
                        await self._reconcile()
                        checked = now
                        continue
                if pause_s <= 0:
                    self._look_ahead(now)
                    if not self._fetches:
                        self._settled.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s if pause_s > 0 else CHECK_S):
                        await self._wake.wait()
        finally:
            for task in self._fetches.values():
                task.cancel()
            for adapter in self._slots:
                self._answer(adapter, lambda: EngineFailed("the engine ended"))

    async def _bring(self, adapter: AdapterSlot, victim: AdapterSlot | None) -> None:
        if victim is not None:
            await self._unload(victim)
        adapter.state = SlotState.LOADING
        assert adapter.path is not None
        began = self._clock()
        try:
            await self._engine.load(adapter.served, adapter.path)
        except AdapterRefused as error:
            adapter.state = SlotState.WANTED
            self._fail(adapter, error)
            took_s = self._clock() - began
        else:
            adapter.state = SlotState.LOADED
            took_s = self._clock() - began
            adapter.load_s += took_s
            self._failures.forget(adapter.served)
            load_s = adapter.files_s + adapter.load_s
            self._uses.add(adapter.name, adapter.digest, loads=1, load_s=load_s)
            # They had their turn, whoever has waited for another since.
            self._let_in(adapter)
            self._changed()
        # Only a load makes an engine evict by itself.
        await self._reconcile()
        if self._engine.stats().running:
            # Requests that run get as many steps as the load took from them; prefetches take fewer.
            self._prefetch_at = max(self._prefetch_at, self._clock() + PREFETCH_PAUSE * took_s)
            await self._sleep(took_s)

    async def _unload(self, victim: AdapterSlot) -> None:
        victim.state = SlotState.LEAVING
        self._changed()
        await self._engine.unload(victim.served)
        victim.state = SlotState.WANTED
        victim.path = None
        if victim.waiting:
            self._fetch(victim)
        self._slots.settle(victim)

    async def _reconcile(self) -> None:
        """Make the books true, whatever the engine did by itself; what requests use is loaded again."""
        if not self._slots.capacity:
            return
        there = await self._engine.loaded()
        booked = {adapter.served: adapter for adapter in self._slots if adapter.state is SlotState.LOADED}
        for served in there - booked.keys():
            await self._engine.unload(served)
        for served in booked.keys() - there:
            adapter = booked[served]
            log.warning("%s: the engine lost it", served)
            if not adapter.users:
                await self._unload(adapter)
                continue
            assert adapter.path is not None
            try:
                await self._engine.load(served, adapter.path)
            except AdapterRefused as error:
                log.warning("%s: %s: %s", served, error.code, error)

    def _admit(self) -> None:
        """Let in who waits for what is loaded by now."""
        for adapter in self._slots:
            waits = adapter.waiting and adapter.state is SlotState.LOADED
            if waits and not self._slots.yields(adapter, self._clock()):
                self._let_in(adapter)

    def _let_in(self, adapter: AdapterSlot) -> None:
        now = self._clock()
        for arrival in adapter.waiting:
            if not arrival.done():
                arrival.set_result(now)
                adapter.users += 1
        adapter.waiting.clear()

    def _look_ahead(self, now: float) -> None:
        """Fetch the files of the next adapter that is held and not here: one at a time, for nobody waits."""
        if self._ahead is not None:
            return
        for adapter in self._slots.ahead(now):
            if adapter.path is None and self._failures.standing(adapter.served, now) is None:
                self._ahead = adapter
                self._fetch(adapter)
                return

    def _fetch(self, adapter: AdapterSlot) -> None:
        if adapter.path is None and adapter not in self._fetches:
            self._fetches[adapter] = asyncio.create_task(self._fetched(adapter))

    async def _fetched(self, adapter: AdapterSlot) -> None:
        began = self._clock()
        try:
            path = await self._files.fetch(adapter.digest)
            found = self._clock()
            await self._files.warm(path)
        except AdapterRefused as error:
            self._fail(adapter, error)
        except Exception as error:
            # Whatever its files are, the other adapters must be served.
            log.exception("%s: its files", adapter.served)
            self._fail(adapter, AdapterRefused("files_missing", repr(error)))
        else:
            adapter.path = path
            adapter.files_s, adapter.load_s = found - began, self._clock() - found
        finally:
            del self._fetches[adapter]
            if self._ahead is adapter:
                self._ahead = None
            self._settle(adapter)

    def _fail(self, adapter: AdapterSlot, error: AdapterRefused) -> None:
        log.warning("%s: %s: %s", adapter.served, error.code, error)
        adapter.path = None
        self._failures.add(adapter.served, error, self._clock())
        self._uses.add(adapter.name, adapter.digest, failed=f"{error.code}: {error}")
        self._answer(adapter, lambda: AdapterRefused(error.code, str(error)))
        self._slots.settle(adapter)
        self._changed()

    def _answer(self, adapter: AdapterSlot, error: Callable[[], Exception]) -> None:
        for arrival in adapter.waiting:
            if not arrival.done():
                arrival.set_exception(error())
        adapter.waiting.clear()

    def _left(self, adapter: AdapterSlot, granted: float | None) -> None:
        """A request left, which had its adapter since ``granted``, or waited for it."""
        if granted is not None:
            adapter.users -= 1
            self._uses.add(adapter.name, adapter.digest, busy_s=self._clock() - granted)
        self._settle(adapter)

    def _settle(self, adapter: AdapterSlot) -> None:
        """What nobody waits for any more takes no slot."""
        if adapter not in self._fetches:
            self._slots.settle(adapter)
        self._stir()

    def _stir(self) -> None:
        self._settled.clear()
        self._wake.set()
