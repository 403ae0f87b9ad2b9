"""A gateway's admission and routing over simulated engines in virtual time: minutes of traffic in seconds.

The objects are those of a worker, and only what carries bytes is left out. A run takes its chance from
one seed, and is the same each time.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from gateway.protocol.errors import Refused
from gateway.queue.admission import Admission
from gateway.routing.fleet import FleetView, ServedModel
from gateway.routing.replica import ReplicaHandle
from gateway.routing.router import ModelRouters
from gateway.telemetry.metrics import Metrics
from policy.config.control import ControlConfig, SloConfig
from policy.config.deployment import Deployment, GatewayConfig, ModelSpec
from policy.engine.model import Timing
from policy.engine.profiles import profile
from policy.engine.scheduler import Request as Work
from policy.engine.scheduler import Scheduler
from policy.errors import Refusal
from policy.request import Request
from policy.types import Load, Priority, Replica, ReplicaPhase
from policy.wire.load import COALESCE_S
from serve.engine.guard import HEARTBEAT_S, LoadLine

# From the gateway to a replica and back, each.
WAY_S = 0.001
MAX_WAIT_S = 5.0


class _Selector(selectors.DefaultSelector):
    """Lets time pass instead of waiting."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen again"
        self.passed += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when there is nothing to do."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.passed


@contextmanager
def _one_clock(loop: VirtualLoop) -> Iterator[None]:
    """What reads the machine's clock reads the loop's, which is the same one in a worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.routing.replica.monotonic", loop.time)
        patch.setattr("gateway.routing.router.time.monotonic", loop.time)
        yield


def play(scene: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run ``scene`` to its end in virtual time."""
    loop = VirtualLoop()
    with _one_clock(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(scene())


class Engine:
    """A replica that admits ``bound`` requests, behind what a guard counts and says of it."""

    def __init__(self, name: str, kind: str, *, speed: float, bound: int) -> None:
        found = profile(kind)
        self._timing = Timing(limits=found.limits(1), model=found.model.faster(speed))
        assert self._timing.model is not None
        self._scheduler = Scheduler(self._timing.model, self._timing.limits)
        self._bound = bound
        self._loop = asyncio.get_running_loop()
        self._told: dict[str, Callable[[], None]] = {}
        self._work = asyncio.Event()
        self._changed = asyncio.Event()
        self._tokens = 0
        replica = Replica(
            id=name,
            model="alpha",
            shape="s",
            generation=1,
            state=ReplicaPhase.READY,
            load=Load(at=0.0, bound=bound),
            url="http://r:1",
        )
        self.link = ReplicaHandle(replica, 1.0, None)
        self.on_line: Callable[[], None] = lambda: None
        self._tasks = [asyncio.create_task(self._step()), asyncio.create_task(self._tell())]

    def take(self, name: str, prompt: int, output: int, told: Callable[[], None]) -> bool:
        """Run a request, and call ``told`` at each of its tokens; whether there was room."""
        if len(self._told) >= self._bound:
            return False
        self._told[name] = told
        self._scheduler.submit(Work(name, prompt, output))
        self._work.set()
        self._changed.set()
        return True

    def close(self) -> None:
        """End its tasks."""
        for task in self._tasks:
            task.cancel()

    async def _step(self) -> None:
        while True:
            if not self._told:
                self._work.clear()
                await self._work.wait()
            step = self._scheduler.step()
            await asyncio.sleep(step.duration_s)
            self._tokens += step.scheduled
            for name in step.tokens:
                told = self._told[name]
                if name in step.finished:
                    del self._told[name]
                    self._changed.set()
                told()

    async def _tell(self) -> None:
        timing: Timing | None = self._timing
        limits = self._timing.limits
        while True:
            self._changed.clear()
            load = Load(
                at=self._loop.time(),
                in_flight=len(self._told),
                bound=self._bound,
                kv_used=self._scheduler.kv_used / limits.kv_tokens,
                tokens=self._tokens,
                pending_tokens=self._scheduler.prefilling,
            )
            line = LoadLine(state=ReplicaPhase.READY, load=load, timing=timing)
            timing = None
            self.link.count(msgspec.json.encode(line), self._loop.time())
            self.on_line()
            await asyncio.sleep(COALESCE_S)
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                pass


@dataclass
class Visit:
    """One client's request with all its tries, in seconds of virtual time."""

    tenant: str
    asked_at: float
    tries: int = 0
    refusals: list[tuple[Refusal, float | None]] = field(default_factory=list)
    ttft_s: float | None = None
    ended_at: float = 0.0


class Town:
    """A worker's admission over engines, and clients that come to it."""

    def __init__(
        self,
        *,
        replicas: int,
        bound: int,
        patience_s: float,
        kind: str = "h100-8b",
        speed: float = 0.5,
        ttft_s: float | None = None,
        seed: int = 0,
        max_queue: int = 1024,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.rng = random.Random(seed)  # noqa: S311 - arrivals, not secrets
        deployment = Deployment(
            models=(ModelSpec(name="alpha", control=ControlConfig(slo=SloConfig(ttft_p95_s=ttft_s))),),
            gateway=GatewayConfig(max_queue=max_queue),
        )
        self.patience_s = patience_s
        self.metrics = Metrics()
        self.routes = ModelRouters(random.Random(seed), deployment=lambda: deployment)  # noqa: S311
        self.admission = Admission(FleetView("", self.metrics), self.metrics, self.routes, lambda: deployment)
        self.served = ServedModel("alpha")
        self.engines = [Engine(f"sim-{i}", kind, speed=speed, bound=bound) for i in range(replicas)]
        self._by_link = {engine.link: engine for engine in self.engines}
        for engine in self.engines:
            engine.on_line = lambda: self.admission.pump("alpha")
            self.served.links.append(engine.link)
        self._count = 0

    def close(self) -> None:
        """End the engines."""
        for engine in self.engines:
            engine.close()

    async def ask(
        self, tenant: str = "", *, prompt: int = 20, output: int = 24, retries: int = 0,
        priority: Priority = Priority.STANDARD,
    ) -> Visit:  # fmt: skip
        """One visit: at most ``retries`` more tries, each after the time that it was told."""
        visit = Visit(tenant, self._loop.time())
        for tried in range(1 + retries):
            visit.tries += 1
            try:
                await self._once(visit, tenant, prompt, output, priority)
                break
            except Refused as refused:
                visit.refusals.append((refused.reason, refused.retry_after_s))
            if tried < retries:
                await asyncio.sleep(min(MAX_WAIT_S, visit.refusals[-1][1] or 1) * (1 + self.rng.random()))
        visit.ended_at = self._loop.time()
        return visit

    async def _once(self, visit: Visit, tenant: str, prompt: int, output: int, priority: Priority) -> None:
        came = self._loop.time()
        density = self.routes.density("alpha")
        request = Request(
            "alpha", tenant, priority, size=4 * prompt, arrived=came, deadline=came + self.patience_s,
            prompt_tokens=int(prompt * 4.0 / density.bytes_a_token),
            output_tokens=min(output, int(density.output_tokens)),
        )  # fmt: skip
        place = self.admission.arrive(self.served, request)
        tokens: asyncio.Queue[None] = asyncio.Queue()

        def said() -> None:
            tokens.put_nowait(None)

        while True:
            link = await self.admission.admit(place)
            asked = self._loop.time()
            await asyncio.sleep(WAY_S)
            self._count += 1
            if self._by_link[link].take(str(self._count), prompt, output, said):
                break
            link.refused(Refusal.BUSY)
            self.admission.release(place, link, whole=False)
        await tokens.get()
        await asyncio.sleep(WAY_S)
        visit.ttft_s = self._loop.time() - came
        self.admission.first_token(place, link, self._loop.time() - asked)
        for _ in range(output - 1):
            await tokens.get()
        await asyncio.sleep(WAY_S)
        self.admission.release(place, link)
        self.admission.settle(place, prompt, output)

    async def open_loop(self, rate: float, seconds: float, tenant: str = "", **more: Any) -> list[Visit]:
        """Visits at Poisson instants, ``rate`` a second, whatever becomes of them."""
        at = self._loop.time()
        end = at + seconds
        visits: list[asyncio.Task[Visit]] = []
        while (at := at + self.rng.expovariate(rate)) < end:
            await asyncio.sleep(at - self._loop.time())
            visits.append(asyncio.create_task(self.ask(tenant, **more)))
        return list(await asyncio.gather(*visits))
