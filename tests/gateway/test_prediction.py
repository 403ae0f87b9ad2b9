"""A router that cannot predict is visible: what it says of first tokens, beside when they came."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.gateway.engines import SimReplica
from tests.gateway.worker import Stack

pytestmark = pytest.mark.slow

MODEL = "alpha"
# An H100 with a model of 8B parameters, in slow motion: a first token takes 50 to 1,000 ms, so that the
# milliseconds of a busy machine are not what is measured. Two replicas carry about 9 requests a second.
PROFILE, SPEED, REPLICAS = "h100-8b", 0.2, 2
LEVELS = {"low": 2.0, "medium": 4.0, "near capacity": 7.0}
LEVEL_S = 12.0
WARM_UP = 60
# The sim's tokenizer makes one token of such a word.
WORDS = ["tide", "gate", "shore", "boat", "wave", "moon", "sand", "salt", "wind", "water", "long", "day"]


class Errors(NamedTuple):
    """Absolute errors of predictions as parts of the actual times: the median, to a bucket, of ``seen``."""

    median: float
    seen: int


def text(tokens: int, seed: int) -> str:
    rng = random.Random(seed)  # noqa: S311 - a prompt
    return " ".join(rng.choices(WORDS, k=tokens))


class Client:
    """Chats of 100 to 4,000 tokens, most of which begin as others do, at moments that wait for nobody."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._rng = random.Random(11)  # noqa: S311 - a workload
        self._systems = [text(self._rng.randint(100, 3000), seed) for seed in range(12)]
        self._asked = 1000

    async def run(self, rate: float, seconds: float) -> None:
        """Ask ``rate`` times a second for ``seconds``, and wait until all is answered."""
        async with asyncio.TaskGroup() as group:
            await self.send(group, rate, seconds)

    async def send(self, group: asyncio.TaskGroup, rate: float, seconds: float) -> None:
        """Ask ``rate`` times a second for ``seconds``; ``group`` is answered."""
        loop = asyncio.get_running_loop()
        due, end = loop.time(), loop.time() + seconds
        while (due := due + self._rng.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            group.create_task(self.ask())

    async def ask(self) -> None:
        """One streamed chat, to its end."""
        self._asked += 1
        own = text(self._rng.randint(100, 1000), self._asked)
        shared = self._rng.random() < 0.75
        head = self._rng.choice(self._systems) if shared else text(self._rng.randint(100, 3000), -self._asked)
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "system", "content": head}, {"role": "user", "content": own}],
                "max_tokens": self._rng.randint(20, 200),
                "stream": True,
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            await self.answered(reader)
        finally:
            writer.close()
            await writer.wait_closed()

    async def answered(self, reader: asyncio.StreamReader) -> None:
        """Read one answer to its end."""
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"data: [DONE]\n\n")


async def buckets(stack: Stack) -> dict[float, float]:
    """The histogram of errors so far, cumulative, by upper bound."""
    found = {}
    for line in (await stack.admin.get("/metrics")).text.splitlines():
        if line.startswith("tidegate_ttft_prediction_error_ratio_bucket{") and f'model="{MODEL}"' in line:
            labels, _, value = line.rpartition(" ")
            found[float(labels.partition('le="')[2].partition('"')[0])] = float(value)
    return found


def errors(before: dict[float, float], after: dict[float, float]) -> Errors:
    counted = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = counted[float("inf")]
    return Errors(next(bound for bound, below in counted.items() if below >= total / 2), int(total))


async def test_first_tokens_come_when_they_were_predicted(tmp_path: Path) -> None:
    stack = Stack(tmp_path)
    replicas = [SimReplica(f"r{i}", PROFILE, speed=SPEED) for i in range(REPLICAS)]
    found: dict[str, Errors] = {}
    try:
        await stack.start_controller()
        await asyncio.gather(stack.start_worker(), *(replica.start() for replica in replicas))
        await stack.ready(*replicas)
        client = Client(int(stack.url.rpartition(":")[2]))
        async with asyncio.TaskGroup() as group:
            # What no profile says is learned first: how many bytes a token has, and what HTTP takes.
            await client.send(group, LEVELS["medium"], WARM_UP / LEVELS["medium"])
            for level, rate in LEVELS.items():
                before = await buckets(stack)
                await client.send(group, rate, LEVEL_S)
                found[level] = errors(before, await buckets(stack))
    finally:
        await stack.close()
        for replica in replicas:
            await replica.stop()
    assert all(error.seen > 12 and error.median <= 0.15 for error in found.values()), found
