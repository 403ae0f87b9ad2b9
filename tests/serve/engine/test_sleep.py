"""Sleep of an engine: requests finish, no adapter is loaded, and the canary precedes traffic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from policy.errors import EngineFailed
from policy.types import ReplicaPhase
from policy.wire.headers import CANARY_HEADER
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.engine_server import follow_commands
from serve.engine.request_guard import RequestGuard
from serve.engine.sleep import SleepControl
from tests.serve.engine.fakes import FakeFiles, Request, wanted
from tests.serve.engine.test_request_guard import CHAT, SECRET, Held, in_flight

READY, DRAINING, ASLEEP = ReplicaPhase.READY, ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP
LONG_S = 3600.0


class SleepingEngine(Held):
    """An engine that falls asleep and wakes when ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: list[str] = []

    async def load(self, name: str, path: object) -> None:
        self.calls.append("load")

    async def sleep(self) -> None:
        await self.gate.wait()
        self.calls.append("sleep")

    async def wake(self) -> None:
        await self.gate.wait()
        self.calls.append("wake")


class Harness:
    """A ready engine, its guard and its sleep control."""

    def __init__(self) -> None:
        self.engine = SleepingEngine()
        self.adapters = AdapterLoader(self.engine, FakeFiles())
        self.guard = RequestGuard(self.engine, self.adapters, secret="s", bound=4, clock=lambda: 42.0)
        self.guard.become(READY)
        self.canary: Callable[[], None] = lambda: self.engine.calls.append("answer")
        self.timeout_s = LONG_S
        self.stdin = asyncio.StreamReader()
        self.control = self._control()
        self.tasks = [asyncio.create_task(self.adapters.run())]

    def _control(self) -> SleepControl:
        async def warm() -> None:
            self.canary()

        return SleepControl(self.engine, self.guard, self.adapters, warm, self.timeout_s)

    def run(self, timeout_s: float = LONG_S) -> asyncio.Task[None]:
        self.timeout_s = timeout_s
        self.control = self._control()
        commands = follow_commands(self.stdin, self.guard, self.adapters, self.control)
        self.tasks.append(asyncio.create_task(commands))
        self.tasks.append(asyncio.create_task(self.control.run()))
        return self.tasks[-1]

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not true():  # noqa: ASYNC110 - states have no event
                await asyncio.sleep(0)

    async def asleep(self) -> None:
        self.control.sleep(LONG_S)
        await self.until(lambda: self.guard.state is ASLEEP)

    async def draining(self) -> Request:
        request = self.request()
        await in_flight(self.guard, 1)
        self.control.sleep(LONG_S)
        await self.until(lambda: self.guard.state is DRAINING)
        return request

    def command(self, line: bytes) -> None:
        self.stdin.feed_data(line + b"\n")

    def request(self, **headers: str) -> Request:
        return Request(self.guard, "POST", CHAT, SECRET | headers)

    async def refusal(self, **headers: str) -> str:
        request = self.request(**headers)
        await request.task
        return dict(request.sent[0]["headers"]).get(b"x-tidegate-refusal", b"").decode()


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    made = Harness()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_it_sleeps_after_the_last_request_and_answers_after_waking(harness: Harness) -> None:
    harness.run()
    request = await harness.draining()
    assert await harness.refusal() == "draining"
    assert harness.engine.calls == []
    harness.engine.go.set()
    await request.task
    await harness.until(lambda: harness.guard.state is ASLEEP)
    assert harness.engine.calls == ["sleep"]
    assert request.sent[0]["status"] == 200
    # Canaries are refused too: the weights are not loaded.
    assert await harness.refusal() == await harness.refusal(**{CANARY_HEADER: "1"}) == "starting"
    seen: list[ReplicaPhase] = []
    harness.canary = lambda: seen.append(harness.guard.state)
    harness.control.wake()
    await harness.until(lambda: harness.guard.state is READY)
    assert seen == [ReplicaPhase.STARTING]
    assert harness.engine.calls == ["sleep", "wake"]
    assert await harness.refusal() == ""


async def test_repeated_commands_have_no_effect(harness: Harness) -> None:
    harness.run()
    harness.control.sleep(LONG_S)
    await harness.asleep()
    await harness.asleep()
    assert harness.engine.calls == ["sleep"]
    for _ in range(2):
        harness.control.wake()
        await harness.until(lambda: harness.guard.state is READY)
    assert harness.engine.calls == ["sleep", "wake", "answer"]


async def test_a_wake_order_while_the_engine_falls_asleep_wakes_it(harness: Harness) -> None:
    harness.run()
    harness.engine.gate.clear()
    harness.control.sleep(LONG_S)
    await harness.until(lambda: harness.guard.state is DRAINING)
    for _ in range(10):
        await asyncio.sleep(0)
    harness.control.wake()
    harness.engine.gate.set()
    await harness.until(lambda: harness.guard.state is READY and "wake" in harness.engine.calls)
    assert harness.engine.calls == ["sleep", "wake", "answer"]


@pytest.mark.parametrize("way", ["fall asleep", "wake"])
async def test_an_engine_that_does_not_sleep_or_wake_in_time_fails(harness: Harness, way: str) -> None:
    running = harness.run(timeout_s=0.01)
    if way == "wake":
        await harness.asleep()
    harness.engine.gate.clear()
    harness.control.wake() if way == "wake" else harness.control.sleep(LONG_S)
    with pytest.raises(EngineFailed, match=f"did not {way} within"):
        await running


async def test_a_draining_engine_neither_sleeps_nor_serves_again(harness: Harness) -> None:
    harness.run()
    harness.control.leave()
    harness.guard.become(DRAINING)
    harness.control.sleep(LONG_S)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (harness.guard.state, harness.engine.calls) == (DRAINING, [])
    harness.control.wake()
    for _ in range(10):
        await asyncio.sleep(0)
    assert harness.guard.state is DRAINING


async def test_no_adapter_is_loaded_during_sleep(harness: Harness) -> None:
    harness.run()
    await harness.asleep()
    harness.adapters.hold(wanted("a"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert harness.engine.calls == ["sleep"]
    harness.control.wake()
    await harness.until(lambda: "load" in harness.engine.calls)
    assert harness.engine.calls[:2] == ["sleep", "wake"]


@pytest.mark.parametrize("drains", [False, True])
async def test_adapters_ordered_before_sleep_are_loaded_unless_it_drains_for_good(
    harness: Harness, drains: bool
) -> None:
    harness.run()
    request = await harness.draining()
    for line in [b"drain"] * drains + [b"hold " + msgspec.json.encode(wanted("a"))]:
        harness.command(line)
    for _ in range(50):
        await asyncio.sleep(0)
    harness.engine.go.set()
    await request.task
    assert ("load" in harness.engine.calls) is not drains
