"""A client that leaves frees its slot in vLLM, wherever its request is."""

from __future__ import annotations

import asyncio
import re
import time

import httpx
import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.stack import Stack, eventually

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(300)]

# The longest step of the shipped deployment: 128 prefill tokens beside a few decodes.
STEP_S = 1.5


def running(stack: Stack) -> int:
    """Requests that the engine itself holds, by its own metrics."""
    (replica,) = stack.replicas(CHAT)
    text = stack.ask_replica(replica, "/metrics").text
    held = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.]+)$", text, re.MULTILINE)
    assert len(held) == 2
    return round(sum(float(value) for value in held))


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
async def test_a_slot_is_free_within_a_second(stack: Stack, stream: bool) -> None:
    await asyncio.to_thread(stack.steady, CHAT, 1)
    body = {
        "model": CHAT,
        "messages": [{"role": "user", "content": "Count as far as you can."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": stream,
    }
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=60, trust_env=False) as client:

        async def ask() -> None:
            async with client.stream("POST", "/chat/completions", json=body) as answer:
                await answer.aread()

        asking = asyncio.create_task(ask())
        await asyncio.to_thread(eventually, lambda: running(stack) == 1, 20)
        asking.cancel()
        left = time.monotonic()
        await asyncio.to_thread(eventually, lambda: running(stack) == 0, 1.0 + STEP_S)
        assert time.monotonic() - left <= 1.0 + STEP_S
    (replica,) = stack.replicas(CHAT)
    eventually(lambda: stack.replicas(CHAT)[0].load.in_flight == 0, 3)
    assert replica.state == "ready"


async def test_a_queued_request_that_leaves_never_reaches_the_engine(stack: Stack) -> None:
    """Unknown adapters aside, the queue forms when the bound is reached: fill it, queue one, leave."""
    await asyncio.to_thread(stack.steady, CHAT, 1)
    (replica,) = stack.replicas(CHAT)
    bound = replica.load.bound
    body = {"model": CHAT, "prompt": "go", "max_tokens": 400, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=stack.base_url, timeout=120, limits=limits, trust_env=False
    ) as client:

        async def ask() -> None:
            async with client.stream("POST", "/completions", json=body) as answer:
                await answer.aread()

        holding = [asyncio.create_task(ask()) for _ in range(bound)]
        await asyncio.to_thread(eventually, lambda: running(stack) == bound, 60)
        queued = asyncio.create_task(ask())
        await asyncio.to_thread(eventually, lambda: depth(stack) == 1, 10)
        queued.cancel()
        await asyncio.to_thread(eventually, lambda: depth(stack) == 0, 1.0)
        assert running(stack) == bound
        for task in holding:
            task.cancel()
        await asyncio.to_thread(eventually, lambda: running(stack) == 0, 30)


def depth(stack: Stack) -> int:
    """How many requests wait at the gateway, by its metrics."""
    text = stack.http.get(f"{stack.admin_url}/metrics").text
    return round(
        sum(float(v) for v in re.findall(r"^tidegate_queue_depth\{[^}]*\} ([0-9.]+)$", text, re.MULTILINE))
    )
