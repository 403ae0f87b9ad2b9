"""The ledger has the usage that clients saw, after kills of workers and of the accounting process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from store.database import Database
from store.key_derivation import digest_of
from store.tenancy import ledger
from tests.gateway.fake_replica import DONE, Exchange, event
from tests.gateway.worker import PATIENCE_S, ROOT, Stack, until

pytestmark = pytest.mark.process

CLIENTS = 6
PROMPT, CACHED = 9, 4
STREAM = {"model": "alpha", "messages": [{"role": "user", "content": "hi"}], "stream": True}
PRICE = {"input": 1.0, "cached_input": 0.5, "output": 4.0}


@dataclass
class Seen:
    """What the client of one request saw: events, the usage, all of it; and the ``output`` that it should."""

    output: int
    events: int = 0
    usage: bool = False
    complete: bool = False


def usage_of(output: int) -> dict[str, Any]:
    counts = {"prompt_tokens": PROMPT, "completion_tokens": output, "total_tokens": PROMPT + output}
    return {**counts, "prompt_tokens_details": {"cached_tokens": CACHED}}


async def answer(exchange: Exchange) -> None:
    """As many events as the request allows tokens, or a whole answer."""
    output = exchange.json["max_tokens"]
    if not exchange.json.get("stream"):
        choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
        body = {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage_of(output)}
        await exchange.reply(json.dumps(body).encode())
        return
    await exchange.head("text/event-stream")
    for _ in range(output - 1):
        await exchange.chunk(event("x"))
        await asyncio.sleep(0.01)
    await exchange.chunk(event(finish="stop"))
    if (exchange.json.get("stream_options") or {}).get("include_usage"):
        last = {"id": "1", "object": "chat.completion.chunk", "choices": [], "usage": usage_of(output)}
        await exchange.chunk(b"data: " + json.dumps(last).encode() + b"\n\n")
    await exchange.chunk(DONE)
    await exchange.end()


class Load:
    """Clients that each ask one after the other, with a new key each time, so that each has its own row."""

    def __init__(self, stack: Stack, keys: list[str], rng: random.Random) -> None:
        self._url = stack.url
        self._keys = keys
        self._rng = rng
        self.seen: dict[str, Seen] = {}
        self.stopping = False
        # Streams that broke off after an event.
        self.cut = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        while not self.stopping:
            async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=PATIENCE_S) as client:
                with contextlib.suppress(httpx.HTTPError):
                    while not self.stopping:
                        await self._ask(client)
            await asyncio.sleep(0.02)

    async def _ask(self, client: httpx.AsyncClient) -> None:
        key = self._keys.pop()
        seen = Seen(output=self._rng.randint(1, 40))
        self.seen[f"declared-{digest_of(key.encode())[:12]}"] = seen
        body: dict[str, Any] = {**STREAM, "max_tokens": seen.output, "stream": self._rng.random() < 0.8}
        asked = body["stream"] and self._rng.random() < 0.5
        if asked:
            body["stream_options"] = {"include_usage": True}
        headers = {"authorization": f"Bearer {key}"}
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        seen.complete = True
                    elif not line.startswith("data:"):
                        seen.complete |= line.startswith("{")
                    elif '"usage"' in line:
                        seen.usage = True
                    else:
                        seen.events += 1
        except httpx.HTTPError:
            self.cut += seen.events > 0
            raise


async def accounting(root: Path, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.accounting.main", "--state", str(root),
        cwd=ROOT, stderr=asyncio.subprocess.DEVNULL, env=os.environ | environment,
    )  # fmt: skip


def check(key: str, seen: Seen, row: dict[str, Any] | None) -> bool:
    """Whether the ledger's row for one request is right; returns whether it was interrupted."""
    if row is None:
        assert not (seen.complete or seen.usage or seen.events), (key, seen)
        return False
    counts = row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]
    exact = counts == (PROMPT, CACHED, seen.output)
    assert row["requests"] == 1, (key, row)
    assert row["cost_nano"] == (counts[0] - counts[1]) * 1000 + counts[1] * 500 + counts[2] * 4000
    if seen.complete or seen.usage:
        assert exact, (key, seen, row)
    if seen.complete:
        assert not row["estimated"] and not row["interrupted"], (key, row)
    elif not exact:
        assert row["estimated"] and seen.events <= row["output_tokens"] <= seen.output, (key, seen, row)
    return bool(row["interrupted"])


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
async def test_the_ledger_is_what_clients_saw(stack: Stack, kills: int) -> None:
    rng = random.Random(kills)  # noqa: S311
    keys = [f"sk-test-{number}-{'x' * 20}" for number in range(100 * kills + 1000)]
    stack.models[0]["price"] = PRICE
    digests = [digest_of(key.encode()) for key in keys]
    stack.tenants = [{"name": "team", "keys_sha256": digests}]
    await stack.start_controller()
    running: dict[str, asyncio.subprocess.Process] = {"accounting": await accounting(stack.root)}
    for number in range(2):
        running[str(number)] = await stack.start_worker(number)
    replica = await stack.serve("one", bound=100)
    replica.answer = answer
    load = Load(stack, keys, rng)
    loading = asyncio.create_task(load.run())
    killed = 0
    while killed < kills or not load.cut:
        killed += 1
        await asyncio.sleep(rng.uniform(0.05, 0.4))
        for name in rng.choice((["0"], ["1"], ["accounting"], ["accounting", "0"])):
            running[name].send_signal(signal.SIGKILL)
            await running[name].wait()
            running[name] = await (
                accounting(stack.root) if name == "accounting" else stack.start_worker(int(name))
            )
    load.stopping = True
    await loading
    for number in range(2):
        running[str(number)].send_signal(signal.SIGKILL)
        await running[str(number)].wait()
    segments = stack.root / "usage"
    await until(lambda: not list(segments.glob("*.usage")), "all segments are in the ledger")
    running["accounting"].terminate()
    assert await running["accounting"].wait() == 0

    database = Database(f"sqlite:///{stack.root / 'tidegate.db'}")
    with database.reading() as connection:
        rows = {row["key_id"]: row for row in ledger.usage(connection, ("key_id",))}
    database.close()
    interrupted = sum(check(key, seen, rows.pop(key, None)) for key, seen in load.seen.items())
    assert not rows, "no row but of these requests"
    complete = sum(seen.complete for seen in load.seen.values())
    assert complete > 5 * kills
    assert interrupted > 0, "some kills hit streams"
