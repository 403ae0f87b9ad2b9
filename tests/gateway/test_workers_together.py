"""Several workers of a host route like one, through shared state."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from loadtests.bench.replica import MockReplicaCounts, MockReplicaSettings
from loadtests.bench.upstream import UpstreamCommand
from loadtests.bench.workload import PrefixedChats, draws
from tests.gateway.worker import ROOT, Stack, until
from tests.ports import free_ports

pytestmark = [pytest.mark.process, pytest.mark.long]

REPLICAS, PREFIXES, REQUESTS, CLIENTS = 4, 32, 1600, 32
RUNS = 3
# 4 KB of prefix take 21 ms to compute, an answer 40 ms.
SETTING = MockReplicaSettings(chunks=4, gap_s=0.01, base_s=0.001, token_s=2e-5, lanes=4)


class Upstreams:
    """The benchmark's replicas in a process of their own."""

    async def start(self) -> None:
        self.ports = free_ports(REPLICAS)
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "loadtests.bench.upstream", *map(str, self.ports),
            cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert self._process.stdout is not None
        ready, _, port = (await self._process.stdout.readline()).decode().partition(" ")
        assert ready == "ready"
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", int(port))

    async def send(self, order: UpstreamCommand) -> list[MockReplicaCounts]:
        """Send an order to all replicas; their counts."""
        self._writer.write(msgspec.json.encode(order) + b"\n")
        return msgspec.json.decode(await self._reader.readline(), type=list[MockReplicaCounts])

    async def stop(self) -> None:
        self._writer.close()
        self._process.kill()
        await self._process.wait()


class Found(NamedTuple):
    """``hit``: the part that found its prefix cached; ``load``: the busiest replica's share over the mean."""

    hit: float
    load: float
    cold: int


async def ask(port: int, request: bytes) -> None:
    """One call on a connection of its own, so that any worker may take it; read to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readuntil(b"data: [DONE]\n\n")
    finally:
        writer.close()
        await writer.wait_closed()


async def drive(stack: Stack, upstreams: Upstreams, drawn: Sequence[int]) -> Found:
    await upstreams.send(UpstreamCommand(setting=SETTING))
    requests = PrefixedChats(drawn, 4096, 256)
    port = int(stack.url.rpartition(":")[2])
    numbers = iter(range(len(drawn)))

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            await ask(port, requests(number))

    async with asyncio.timeout(120), asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client(numbers))
    counts = await upstreams.send(UpstreamCommand())
    seen = [count.requests for count in counts]
    assert sum(seen) == len(drawn)
    cold = sum(count.cold for count in counts)
    return Found(hit=1 - cold / len(drawn), load=max(seen) * REPLICAS / sum(seen), cold=cold)


def external(ports: Sequence[int]) -> dict[str, Any]:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    return {"name": "alpha", "engine": "external", "urls": urls}


async def measured(root: Path, upstreams: Upstreams, workers: int, drawn: Sequence[int]) -> Found:
    """A stack of ``workers`` gateway workers, from nothing, over the draws."""
    stack = Stack(root)
    stack.models = [external(upstreams.ports)]
    try:
        await asyncio.gather(*(stack.start_worker(number) for number in range(workers)))
        await until(lambda: stack_is_up(stack), "upstreams are known")
        await asyncio.sleep(1.0)  # every worker, not only the one that answered
        return await drive(stack, upstreams, drawn)
    finally:
        await stack.close()


async def stack_is_up(stack: Stack) -> bool:
    replicas = (await stack.admin.get("/admin/fleet")).json()["replicas"]
    return len(replicas) == REPLICAS and all(entry["admissible"] for entry in replicas)


# tests/policy checks both, and the balance to a hundredth, without processes.
@pytest.mark.parametrize("exponent", [0.0, 1.0], ids=["uniform", "zipf"])
async def test_workers_match_a_single_one(tmp_path_factory: pytest.TempPathFactory, exponent: float) -> None:
    rng = random.Random(7)  # noqa: S311 - a workload
    drawn = draws(REQUESTS, PREFIXES, exponent, rng)
    upstreams = Upstreams()
    await upstreams.start()
    try:
        single = await measured(tmp_path_factory.mktemp("single"), upstreams, 1, drawn)
        for workers in (2, 8):
            found: list[Found] = []
            # A core that others use makes a replica look slow for a while, and what then goes elsewhere
            # is not made up for in 1,600 requests: one of a few runs shows what workers are capable of.
            while not found or (len(found) < RUNS and not as_good(found[-1], single)):
                root = tmp_path_factory.mktemp("together")
                found.append(await measured(root, upstreams, workers, drawn))
            assert as_good(found[-1], single), json.dumps([one._asdict() for one in (single, *found)])
    finally:
        await upstreams.stop()


def as_good(found: Found, single: Found) -> bool:
    """Within three points of one worker's hit rate, and balanced; the aim of 1.10 is not always met here."""
    return found.hit > single.hit - 0.03 and found.load <= 1.25
