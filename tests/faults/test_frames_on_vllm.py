"""Faults of frames with real vLLM as the replica: each stream has the engine's text, or ends by the rule."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import psutil
import pytest
import pytest_asyncio

from loadtests.bench.parts.token_servers import write_model
from policy.wire.headers import SECRET_HEADER
from tests.faults.harness import Harness
from tests.faults.live import MODEL, Live, send
from tests.faults.load_generator import quantile
from tests.faults.proxy import Proxy
from tests.faults.raw_client import RawClient, Reply
from tests.faults.test_frames import disconnect_500_times
from tests.gateway.fake_replica import SECRET, FakeReplica, reset
from tests.gateway.worker import until
from tests.serve.engine.fast_path.corpus import TO_VLLM

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [
    pytest.mark.vllm, pytest.mark.process, pytest.mark.slow, pytest.mark.long,
    pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800),
]  # fmt: skip
STREAMS = 16
RUNNING = "vllm:num_requests_running{"
FREED_S = 1.0
# Of a worker or a front, after what a test did to it.
MORE_BYTES = 32 * 2**20
# A connection that breaks is a failure of each of its streams.
GATEWAY = {"eject": {"base_s": 0.2, "max_s": 0.2}}


class Engines:
    """Two real engines of a controller, with a gateway worker, and what vLLM says of them."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self._texts: dict[tuple[int, int | None], str] = {}

    async def running(self) -> int:
        """The requests that run, by vLLM's own count."""
        return sum([await self._running(one["url"]) for one in (await self.live.replicas_ready()).values()])

    async def freed(self, since: float, stalls_s: float) -> None:
        async def none() -> bool:
            return await self.running() == 0

        await until(none, "no request runs")
        assert time.monotonic() - since <= FREED_S + stalls_s

    async def texts(self, tokens: int, seeds: Sequence[int | None]) -> list[str]:
        """The texts of these requests from vLLM's own HTTP app in a replica."""
        missing = {seed for seed in seeds if (tokens, seed) not in self._texts}
        (replica, *_) = (await self.live.replicas_ready()).values()
        async with client(replica["url"]) as http:

            async def ask(seed: int | None) -> None:
                body = {"messages": [{"role": "user", "content": "hi"}], **request(tokens, seed)}
                answer = await http.post("/v1/chat/completions", json=body, headers=TO_VLLM)
                text = answer.raise_for_status().json()["choices"][0]["message"]["content"]
                self._texts[tokens, seed] = text

            await asyncio.gather(*map(ask, missing))
        return [self._texts[tokens, seed] for seed in seeds]

    @staticmethod
    async def _running(url: str) -> int:
        async with client(url) as http:
            lines = (await http.get("/metrics")).text.splitlines()
        return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(RUNNING))


def client(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {SECRET_HEADER: SECRET}
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=300, trust_env=False)


def request(tokens: int, seed: int | None) -> dict[str, Any]:
    """Greedy without a seed. The dummy model has all tokens about as likely: each seed has its text."""
    drawn = {"temperature": 0} if seed is None else {"temperature": 1.0, "seed": seed}
    return {"model": MODEL, "max_tokens": tokens, "ignore_eos": True, **drawn}


async def started(harness: Harness, tokens: int, seeds: Sequence[int | None], **more: Any) -> list[RawClient]:
    return [await harness.post(**request(tokens, seed), stream=True, **more) for seed in seeds]


async def ended(clients: Sequence[RawClient]) -> list[Reply]:
    return await asyncio.gather(*(one.end() for one in clients))


def served_by(reply: Reply) -> str:
    return reply.headers["x-tidegate-replica"]


def check_texts(replies: Sequence[Reply], texts: Sequence[str], hurt: Sequence[str] = ()) -> int:
    """Each is its text, or on a ``hurt`` replica the begin of it and an error; returns how many ended so."""
    broken = 0
    for reply, text in zip(replies, texts, strict=True):
        if reply.status == 200 and reply.error is None:
            assert reply.text == text
        else:
            assert served_by(reply) in hurt
            assert reply.status != 200 or text.startswith(reply.text)
            broken += 1
    return broken


@asynccontextmanager
async def keeps_its_size(*pids: int) -> AsyncIterator[None]:
    """The processes ``pids`` end with no more open files than they had, and about their memory."""
    processes = [psutil.Process(pid) for pid in pids]
    files = [0 for _ in processes]
    for _ in range(20):  # a worker that publishes its metrics has closed its reserve descriptor meanwhile
        files = [max(had, one.num_fds()) for one, had in zip(processes, files, strict=True)]
        await asyncio.sleep(0.01)
    memory = [one.memory_info().rss for one in processes]
    yield
    # Fewer are no leak.
    await until(
        lambda: all(one.num_fds() <= had for one, had in zip(processes, files, strict=True)),
        f"{files} open files again",
    )
    grown = [one.memory_info().rss - before for one, before in zip(processes, memory, strict=True)]
    assert max(grown) < MORE_BYTES, grown


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    source = write_model(tmp_path_factory.mktemp("model"))
    async with Live(tmp_path_factory.mktemp("live"), GATEWAY, source=source).running(2) as live:
        yield Engines(live)


class CutProxy(Proxy):
    """Ends its links where so many bytes have passed, as ``how`` says."""

    def __init__(self, target: int) -> None:
        super().__init__(target)
        self.left: int | None = None
        self.how = ""

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if self.left is None or len(data) <= self.left:
            self.left = None if self.left is None else self.left - len(data)
            await super()._write(writer, data)
            return
        data, self.left = data[: self.left], None
        if self.how == "no frame":
            # No text, no number of a stream, and too long for a length.
            await super()._write(writer, data + b"\xff" * 64)
            return
        await super()._write(writer, data)
        if self.how == "RST":
            for end in self._ends:
                reset(end.transport)  # type: ignore[arg-type] # it is a stream's
        raise ConnectionAbortedError


class Entry:
    """A replica of a controller in the fleet of a test, at another address perhaps."""

    def __init__(self, described: dict[str, Any], port: int | None = None) -> None:
        self.id = str(described["id"])
        self.url = str(described["url"]) if port is None else f"http://127.0.0.1:{port}"
        self._described = described

    def entry(self, state: str) -> dict[str, Any]:
        return {**self._described, "state": state, "url": self.url}


@pytest_asyncio.fixture(loop_scope="module")
async def beside(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """Another worker before the same engines, whose fleet is the test's."""
    harness = Harness(tmp_path_factory.mktemp("beside"), GATEWAY)
    harness.models = engines.live.models
    await harness.start_controller()
    await harness.start_worker()
    yield harness
    await harness.close()


async def test_a_disconnect_frees_vllms_slot_500_times(engines: Engines) -> None:
    (worker,) = engines.live.workers
    fronts = [each["pid"] for each in (await engines.live.settle(2)).values()]
    async with keeps_its_size(worker.pid, *fronts):
        await disconnect_500_times(engines.live, engines.running)


async def test_cuts_at_random_bytes_end_each_stream_by_the_rule(engines: Engines, beside: Harness) -> None:
    rounds, tokens = 24, 200
    seeds = range(STREAMS)
    texts = await engines.texts(tokens, seeds)
    fleet = list((await engines.live.settle(2)).values())
    proxies = [CutProxy(int(each["url"].rpartition(":")[2])) for each in fleet]
    for proxy in proxies:
        await proxy.start()
    entries = [Entry(each, proxy.port) for each, proxy in zip(fleet, proxies, strict=True)]
    await beside.ready(*cast("list[FakeReplica]", entries))
    draw = random.Random(20)  # noqa: S311 - places of cuts
    broken = whole = 0
    (worker,) = beside.workers

    async def cut(number: int) -> None:
        nonlocal broken, whole
        hurt = number % len(proxies)
        proxies[hurt].how = ("FIN", "RST", "no frame")[number % 3]
        proxies[hurt].left = draw.randrange(STREAMS * tokens * 150)
        clients = await started(beside, tokens, seeds)
        replies = await ended(clients)
        ended_at = time.monotonic()
        proxies[hurt].left = None
        cut_off = check_texts(replies, texts, [entries[hurt].id])
        broken, whole = broken + cut_off, whole + len(replies) - cut_off
        await engines.freed(ended_at, after.stalls.seconds)
        await until(lambda: all(len(proxy.links) == 1 for proxy in proxies), "both are connected")
        for entry in entries:
            await until(lambda entry=entry: beside.admissible(entry.id), f"{entry.id} is admissible")

    async with beside.expect(MODEL) as after:
        await cut(0)
        async with keeps_its_size(worker.pid, *(each["pid"] for each in fleet)):
            for number in range(1, rounds):
                await cut(number)
        assert (await after.outcomes())["ok"] == whole
    assert broken >= rounds and whole >= rounds
    for proxy in proxies:
        await proxy.stop()


@pytest.mark.parametrize("what", ["engine core", "front"])
async def test_a_killed_engine_ends_its_own_streams(engines: Engines, beside: Harness, what: str) -> None:
    tokens, live = 1000, engines.live
    texts = await engines.texts(tokens, range(STREAMS))
    fleet = await live.settle(2)
    (worker,) = live.workers
    async with keeps_its_size(worker.pid), live.expect(MODEL) as after:
        clients = await started(live, tokens, range(STREAMS))
        for one in clients:
            await one.events(5)
        victim = served_by(clients[0].reply)
        # Routing may have sent all of them to the engine that answered faster so far.
        await beside.ready(*(cast("FakeReplica", Entry(fleet[each])) for each in fleet if each != victim))
        others = await started(beside, tokens, range(STREAMS))
        front = fleet[victim]["pid"]
        send(front if what == "front" else core_of(front), signal.SIGKILL)
        replies = await ended(clients)
        broken = check_texts(replies, texts, [victim])
        assert 0 < broken == sum(served_by(reply) == victim for reply in replies)
        assert check_texts(await ended(others), texts) == 0
        assert await after.outcomes() == Counter({"ok": STREAMS - broken, "stream_broken": broken})
        await engines.freed(time.monotonic(), after.stalls.seconds)
        assert (await live.settle(2)).keys() == fleet.keys()  # it is restarted in place
        again = await started(live, tokens, range(STREAMS))
        check_texts(await ended(again), texts)


async def test_a_killed_worker_frees_all_slots(engines: Engines) -> None:
    tokens, live = 1000, engines.live
    texts = await engines.texts(tokens, range(STREAMS))
    fleet = await live.settle(2)
    async with keeps_its_size(*(each["pid"] for each in fleet.values())):
        clients = await started(live, tokens, range(STREAMS))
        for one in clients:
            await one.events(5)
        worker = live.workers.pop()
        killed_at = send(worker.pid, signal.SIGKILL)
        await worker.wait()
        for one, text in zip(clients, texts, strict=True):
            while await one.read():
                pass
            assert one.reply.cut and text.startswith(one.reply.text)
        await engines.freed(killed_at, 1.0)
        await live.start_worker()
        await live.reconnect_admin()
        await live.settle(2)
        again = await started(live, tokens, range(STREAMS))
        check_texts(await ended(again), texts)


def core_of(front: int) -> int:
    """The process of vLLM's engine core."""
    family = psutil.Process(front).children(recursive=True)
    return next(each.pid for each in family if "EngineCore" in " ".join(each.cmdline()))


class SlowReaders:
    """256 streams of one engine through a worker, of which 64 may be read at 1 KB/s until it is done."""

    slow, others = 64, 192
    # Those of a slow one are more than the kernel, the worker and the window take.
    slow_tokens, tokens = 1200, 200

    def __init__(self, engines: Engines, worker: Harness, seeds: Sequence[int | None]) -> None:
        self._engines = engines
        self._worker = worker
        self._seeds = seeds
        self.memory: list[int] = []

    async def p99(self, *, slowly: bool) -> float:
        """The ITL of the others; all have the engine's texts."""
        first, rest = self._seeds[: self.slow], self._seeds[self.slow :]
        window = {"window_bytes": 4096} if slowly else {}
        held = await started(self._worker, self.slow_tokens, first, **window)
        others = await started(self._worker, self.tokens, rest)
        read: Coroutine[Any, Any, Any] = self._dribble(held) if slowly else ended(held)
        reading = asyncio.create_task(read)
        replies = await ended(others)
        async with asyncio.timeout(600):
            while await self._engines.running():  # noqa: ASYNC110 - no event
                await asyncio.sleep(1.0)
        self.memory.append(psutil.Process(self._worker.workers[0].pid).memory_info().rss)
        if slowly:
            reading.cancel()
            await asyncio.wait([reading])
            assert not any(one.reply.whole for one in held)
            reading = asyncio.create_task(ended(held))
        check_texts(await reading, await self._engines.texts(self.slow_tokens, first))
        check_texts(replies, await self._engines.texts(self.tokens, rest))
        gaps = [b[0] - a[0] for reply in replies for a, b in itertools.pairwise(reply.arrivals)]
        return quantile(gaps, 0.99)

    @staticmethod
    async def _dribble(held: Sequence[RawClient]) -> None:
        while True:
            for one in held:
                await one.read(1024)
            await asyncio.sleep(1.0)


@pytest_asyncio.fixture(loop_scope="module")
async def one_engine(engines: Engines, beside: Harness) -> Harness:
    (replica, *_) = (await engines.live.settle(2)).values()
    await beside.ready(cast("FakeReplica", Entry(replica)))
    return beside


async def test_64_of_256_streams_that_read_slowly_lose_nothing(engines: Engines, one_engine: Harness) -> None:
    async with one_engine.expect(MODEL, {"ok": 256}, attempts=256):
        await SlowReaders(engines, one_engine, range(256)).p99(slowly=True)


@pytest.mark.usefixtures("idle_cores")
async def test_64_of_256_streams_that_read_slowly_do_not_delay_the_others(
    engines: Engines, one_engine: Harness
) -> None:
    """Greedy: the steps are short then, so that a delay by the worker shows. All have the same text."""
    readers = SlowReaders(engines, one_engine, [None] * 256)
    found = [(await readers.p99(slowly=False), await readers.p99(slowly=True)) for _ in range(2)]
    # The best of the rounds: other load of the machine may slow one.
    without, beside_slow = map(min, zip(*found, strict=True))
    assert beside_slow <= 1.2 * without, found
    assert readers.memory[-1] - readers.memory[0] < MORE_BYTES
