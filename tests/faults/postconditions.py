"""Postconditions of every fault: all resources are released, and all requests are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from types import TracebackType
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.faults.harness import Harness

EVERY_S = 0.01
# The wake-up delay of an idle machine.
USUAL_S = 0.01


class Stalls:
    """While it runs, ``seconds`` sums the late wake-ups of this loop; on an idle machine it is 0."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            late = loop.time() - due
            if late > USUAL_S:
                self.seconds += late


IDLE_WITHIN_S = 20.0


class Postconditions:
    """Around one test: on exit no resource is held, and ``outcomes`` has the counted requests."""

    def __init__(
        self, harness: Harness, model: str, outcomes: dict[str, int] | None, attempts: int | None
    ) -> None:
        self._harness = harness
        self._model = model
        self._outcomes = outcomes
        self._attempts = attempts
        self._before: Counter[str] = Counter()
        self._attempts_before = 0.0
        self.stalls = Stalls()

    async def __aenter__(self) -> Postconditions:
        scraped = await self._harness.scrape("tidegate_requests", "tidegate_replica_attempts")
        self._before = await self._counted(scraped)
        self._attempts_before = await self._attempted(scraped)
        self.stalls.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stalls.stop()
        if kind is not None:
            return
        for upstream in self._harness.upstreams:
            upstream.report(pretended=0)
        held: list[str] = ["not looked at"]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + IDLE_WITHIN_S
        while held and loop.time() < deadline:
            held = await self._held()
            await asyncio.sleep(0.05 if held else 0)
        assert not held
        found = await self.outcomes()
        if self._outcomes is None:
            assert found.total() > 0
        else:
            assert found == self._outcomes
        if self._attempts is not None:
            assert await self.attempts() == self._attempts

    async def outcomes(self) -> Counter[str]:
        return await self._counted() - self._before

    async def attempts(self) -> float:
        return await self._attempted() - self._attempts_before

    async def _counted(self, scraped: str | None = None) -> Counter[str]:
        samples = await self._harness.samples("tidegate_requests_total", scraped, model=self._model)
        counts: Counter[str] = Counter()
        for labels, value in samples:
            counts[labels["outcome"]] += int(value)
        return counts

    async def _attempted(self, scraped: str | None = None) -> float:
        samples = await self._harness.samples("tidegate_replica_attempts_total", scraped, model=self._model)
        return sum(value for _, value in samples)

    async def _held(self) -> list[str]:
        held = []
        for link in (await self._harness.admin.get("/admin/fleet")).json()["replicas"]:
            held += [
                f"{link['id']}: {key} {link[key]}"
                for key in ("mine", "in_flight", "pending_tokens")
                if link.get(key)
            ]
        scraped = await self._harness.scrape(*self._harness.gauges)
        for name in self._harness.gauges:
            samples = await self._harness.samples(name, scraped)
            held += [f"{name}{labels}: {value}" for labels, value in samples if value]
        held += [f"{one.id}: {len(one.open)} open" for one in self._harness.upstreams if one.open]
        return held + self._sockets()

    def _sockets(self) -> list[str]:
        """Connections of the workers without a peer, or closed by their clients."""
        held = []
        reached = dict(upstream.reached for upstream in self._harness.upstreams)
        for worker in self._harness.workers:
            if worker.returncode is not None:
                continue
            for one in psutil.Process(worker.pid).net_connections("tcp"):
                if one.status == psutil.CONN_CLOSE_WAIT:
                    held.append(f"a connection of {one.laddr} that the other side has closed")
                if one.status != psutil.CONN_ESTABLISHED or not one.raddr:
                    continue
                if one.laddr.port == self._harness.port:
                    held.append(f"a client's connection from {one.raddr}")
                if one.laddr.port not in reached.get(one.raddr.port, {one.laddr.port}):
                    held.append(f"a connection to {one.raddr} of which that knows nothing")
        return held
