"""An engine and adapter files in memory, for tests of adapter loads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from policy.engine.performance_model import BatchLimits, Timing
from policy.errors import AdapterRefused, PreconditionFailed
from policy.routing.engine_prefix_index import KvBlockIndex
from policy.wire.headers import REFUSAL_HEADER
from policy.wire.heartbeat import AdapterRef
from serve.engine.adapters.files import AdapterFileCache
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.interface import EngineStats
from serve.engine.request_guard import RequestGuard
from tests.clock import Clock
from tests.serve.sim_driver import OpenRequest, until

TIMING = Timing(limits=BatchLimits(max_num_batched_tokens=256, max_num_seqs=8, kv_tokens=4096))


def digest(letter: str) -> str:
    """A whole digest of one letter of a to f, or one digit."""
    return letter * 64


def served(letter: str) -> str:
    """The serving name of the adapter ``letter`` in the version of that digest."""
    return f"{letter}@{letter * 12}"


def wanted(letters: str) -> list[AdapterRef]:
    return [AdapterRef(name=letter, digest=digest(letter)) for letter in letters]


class FakeEngine:
    """An engine with ``slots``: it refuses what is in ``refuses``, and loads while ``gate`` is open."""

    max_model_len: int | None = 512
    blocks: KvBlockIndex | None = None
    dead = False

    def __init__(self, slots: int, clock: Clock) -> None:
        self.adapter_slots = slots
        self.there: list[str] = []
        self.log: list[str] = []
        self.refuses: set[str] = set()
        self.takes_s: dict[str, float] = {}
        self.broken: Exception | None = None
        self.running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._clock = clock
        self._busy = False

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("no request comes here")

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running)

    def timing(self) -> Timing:
        return TIMING

    def adapters(self) -> tuple[str, ...]:
        return tuple(self.there)

    async def load(self, name: str, path: Path) -> None:
        assert not self._busy, "two loads at once"
        self.log.append(f"+{name[0]}")
        self._busy = True
        try:
            await self.gate.wait()
        finally:
            self._busy = False
        if self.broken is not None:
            raise self.broken
        self._clock.now += self.takes_s.get(name, 0.0)
        if name in self.refuses:
            raise AdapterRefused("engine_refused", "the rank is wrong")
        assert len(self.there) < self.adapter_slots, "no slot is free"
        self.there.append(name)

    async def profile(self, seconds: float) -> Path:
        raise PreconditionFailed("it has no profiler")

    async def unload(self, name: str) -> None:
        assert not self._busy, "unloads while it loads"
        self.log.append(f"-{name[0]}")
        await asyncio.sleep(0)
        if name in self.there:
            self.there.remove(name)

    async def loaded(self) -> frozenset[str]:
        return frozenset(self.there)

    async def sleep(self) -> None:
        assert not self._busy, "sleeps while it loads"
        self.log.append("sleep")

    async def wake(self) -> None:
        self.log.append("wake")

    async def check(self) -> None:
        return

    async def close(self) -> None:
        return


class Request(OpenRequest):
    """A request at the guard."""

    def __init__(
        self,
        guard: RequestGuard,
        method: str,
        path: str,
        headers: dict[str, str],
        body: tuple[bytes, ...] = (b"{}",),
    ) -> None:
        super().__init__(guard, path, *body, method=method, headers=headers)

    @property
    def refusal(self) -> tuple[int, str, str]:
        """Status, header and message."""
        head = dict(self.sent[0]["headers"])
        error = msgspec.json.decode(self.sent[1]["body"])["error"]
        assert error["code"] == head[REFUSAL_HEADER.encode()].decode()
        return self.sent[0]["status"], error["code"], error["message"]


class FakeFiles(AdapterFileCache):
    """Files of every digest but those in ``missing``; those in ``slow`` wait for ``go``."""

    def __init__(self) -> None:
        super().__init__((), controller="", secret="", max_bytes=0)
        self.fetched: list[str] = []
        self.retained: set[str] = set()
        self.missing: set[str] = set()
        self.slow: set[str] = set()
        self.go = asyncio.Event()

    async def fetch(self, digest: str) -> Path:
        self.fetched.append(digest[0])
        await asyncio.sleep(0)
        if digest[0] in self.slow:
            await self.go.wait()
        if digest[0] in self.missing:
            raise AdapterRefused("files_missing", "not found")
        return Path("/adapters") / digest

    def retain(self, digests: Collection[str]) -> None:
        self.retained = {digest[0] for digest in digests}

    async def warm(self, path: Path) -> None:
        await asyncio.sleep(0)


@asynccontextmanager
async def using(adapters: AdapterLoader, letter: str) -> AsyncIterator[None]:
    """The adapter is loaded within the block; raises as its lease does."""
    with adapters.lease(letter, digest(letter)) as arrival:
        if arrival is not None:
            await arrival
        yield


class Replica:
    """An adapter loader over both."""

    def __init__(self, slots: int) -> None:
        self.clock = Clock()
        self.engine = FakeEngine(slots, self.clock)
        self.files = FakeFiles()
        self.slept: list[float] = []
        self.adapters = AdapterLoader(self.engine, self.files, clock=self.clock, sleep=self._sleep)

    async def _sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)

    def use(self, letter: str) -> User:
        return User(self.adapters, letter)

    async def using(self, letter: str) -> User:
        """A request that has its adapter."""
        user = self.use(letter)
        await until(lambda: user.in_use)
        return user

    async def used(self, letters: str) -> None:
        """One short request for each, one after another."""
        for letter in letters:
            async with using(self.adapters, letter):
                pass


class User:
    """A request that leases its adapter until :meth:`stop`; ``in_use`` once it has it."""

    def __init__(self, adapters: AdapterLoader, letter: str) -> None:
        self.in_use = False
        self._stop = asyncio.Event()
        self._adapters = adapters
        self.letter = letter
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async with using(self._adapters, self.letter):
            self.in_use = True
            try:
                await self._stop.wait()
            finally:
                self.in_use = False

    async def stop(self) -> None:
        """End it, unless it was cancelled."""
        self._stop.set()
        await asyncio.wait([self.task])
        if not self.task.cancelled():
            self.task.result()


@asynccontextmanager
async def replica(slots: int) -> AsyncIterator[Replica]:
    """A replica whose loader runs within the block."""
    made = Replica(slots)
    running = asyncio.ensure_future(made.adapters.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.wait([running])
    if not running.cancelled():
        running.result()


async def quiet() -> None:
    """Let everything run that can."""
    for _ in range(50):
        await asyncio.sleep(0)
