"""An engine's sleep: what runs may finish, nothing is loaded meanwhile, and traffic waits for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from policy.errors import EngineFailed
from policy.types import ReplicaPhase
from policy.wire.headers import CANARY_HEADER
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.request_guard import Guard
from serve.engine.sleep import SleepControl
from tests.serve.engine.fakes import FakeFiles, Request, wanted
from tests.serve.engine.test_request_guard import CHAT, SECRET, Held, in_flight

READY, DRAINING, ASLEEP = ReplicaPhase.READY, ReplicaPhase.DRAINING, ReplicaPhase.ASLEEP
LONG_S = 3600.0


class Sleepy(Held):
    """An engine that falls asleep and wakes when its ``bell`` lets it."""

    def __init__(self) -> None:
        super().__init__(slots=1)
        self.bell = asyncio.Event()
        self.bell.set()
        self.did: list[str] = []

    async def load(self, name: str, path: object) -> None:
        self.did.append("load")

    async def sleep(self) -> None:
        await self.bell.wait()
        self.did.append("sleep")

    async def wake(self) -> None:
        await self.bell.wait()
        self.did.append("wake")


class Place:
    """An engine that is ready, its guard, and its rest."""

    def __init__(self) -> None:
        self.engine = Sleepy()
        self.adapters = AdapterLoader(self.engine, FakeFiles())
        self.guard = Guard(self.engine, self.adapters, secret="s", bound=4, clock=lambda: 42.0)
        self.guard.become(READY)
        self.warms: Callable[[], None] = lambda: self.engine.did.append("answer")
        self.timeout_s = LONG_S
        self.rest = self._rest()
        self.tasks = [asyncio.create_task(self.adapters.run())]

    def _rest(self) -> SleepControl:
        async def warm() -> None:
            self.warms()

        return SleepControl(self.engine, self.guard, self.adapters, warm, self.timeout_s)

    def run(self, timeout_s: float = LONG_S) -> asyncio.Task[None]:
        self.timeout_s = timeout_s
        self.rest = self._rest()
        self.tasks.append(asyncio.create_task(self.rest.run()))
        return self.tasks[-1]

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not true():  # noqa: ASYNC110 - states have no event
                await asyncio.sleep(0)

    async def asleep(self) -> None:
        self.rest.sleep(LONG_S)
        await self.until(lambda: self.guard.state is ASLEEP)

    async def draining(self) -> Request:
        request = self.request()
        await in_flight(self.guard, 1)
        self.rest.sleep(LONG_S)
        await self.until(lambda: self.guard.state is DRAINING)
        return request

    def request(self, **headers: str) -> Request:
        return Request(self.guard, "POST", CHAT, SECRET | headers)

    async def refusal(self, **headers: str) -> str:
        request = self.request(**headers)
        await request.task
        return dict(request.sent[0]["headers"]).get(b"x-tidegate-refusal", b"").decode()


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_it_sleeps_after_the_last_request_and_answers_the_canary_after_waking(place: Place) -> None:
    place.run()
    request = await place.draining()
    assert await place.refusal() == "draining"
    assert place.engine.did == []
    place.engine.go.set()
    await request.task
    await place.until(lambda: place.guard.state is ASLEEP)
    assert place.engine.did == ["sleep"]
    assert request.sent[0]["status"] == 200
    # Not even a canary comes through: there are no weights to answer it.
    assert await place.refusal() == await place.refusal(**{CANARY_HEADER: "1"}) == "starting"
    seen: list[ReplicaPhase] = []
    place.warms = lambda: seen.append(place.guard.state)
    place.rest.wake()
    await place.until(lambda: place.guard.state is READY)
    assert seen == [ReplicaPhase.STARTING]
    assert place.engine.did == ["sleep", "wake"]
    assert await place.refusal() == ""


async def test_repeated_commands_have_no_effect(place: Place) -> None:
    place.run()
    place.rest.sleep(LONG_S)
    await place.asleep()
    await place.asleep()
    assert place.engine.did == ["sleep"]
    for _ in range(2):
        place.rest.wake()
        await place.until(lambda: place.guard.state is READY)
    assert place.engine.did == ["sleep", "wake", "answer"]


async def test_a_wake_during_falling_asleep_wakes(place: Place) -> None:
    place.run()
    place.engine.bell.clear()
    place.rest.sleep(LONG_S)
    await place.until(lambda: place.guard.state is DRAINING)
    for _ in range(10):
        await asyncio.sleep(0)
    place.rest.wake()
    place.engine.bell.set()
    await place.until(lambda: place.guard.state is READY and "wake" in place.engine.did)
    assert place.engine.did == ["sleep", "wake", "answer"]


@pytest.mark.parametrize("way", ["fall asleep", "wake"])
async def test_a_stuck_engine_fails(place: Place, way: str) -> None:
    running = place.run(timeout_s=0.01)
    if way == "wake":
        await place.asleep()
    place.engine.bell.clear()
    place.rest.wake() if way == "wake" else place.rest.sleep(LONG_S)
    with pytest.raises(EngineFailed, match=f"did not {way} within"):
        await running


async def test_a_draining_engine_neither_sleeps_nor_serves_again(place: Place) -> None:
    place.run()
    place.rest.leave()
    place.guard.become(DRAINING)
    place.rest.sleep(LONG_S)
    for _ in range(10):
        await asyncio.sleep(0)
    assert (place.guard.state, place.engine.did) == (DRAINING, [])
    place.rest.wake()
    for _ in range(10):
        await asyncio.sleep(0)
    assert place.guard.state is DRAINING


async def test_no_adapter_is_loaded_during_sleep(place: Place) -> None:
    place.run()
    await place.asleep()
    place.adapters.hold(wanted("a"))
    for _ in range(50):
        await asyncio.sleep(0)
    assert place.engine.did == ["sleep"]
    place.rest.wake()
    await place.until(lambda: "load" in place.engine.did)
    assert place.engine.did[:2] == ["sleep", "wake"]
