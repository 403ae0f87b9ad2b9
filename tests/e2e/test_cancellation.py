"""A client disconnect frees its slot in vLLM, in every phase of its request."""

from __future__ import annotations

import asyncio
import re
import time

import httpx
import pytest

from tests.e2e.conftest import CHAT
from tests.e2e.stack import Stack, eventually
from tests.e2e.traffic import PATIENCE_S

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900, func_only=True)]

# The limit of a cancellation, after the engine's running step.
FREED_S = 1.0


@pytest.fixture(scope="module")
def step_s(stack: Stack) -> float:
    """The longest step of the shipped deployment, on this machine now: 128 tokens of prefill, and slack."""
    stack.steady(CHAT, 1)
    took = []
    for n in range(3):
        body = {"model": CHAT, "prompt": f"{n} " * 60, "max_tokens": 1}
        began = time.monotonic()
        assert stack.http.post(f"{stack.base_url}/completions", json=body).status_code == 200
        took.append(time.monotonic() - began)
    return max(1.5, 2 * max(took))


def running(stack: Stack) -> int:
    (replica,) = stack.replicas(CHAT)
    text = stack.ask_replica(replica, "/metrics").text
    held = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.]+)$", text, re.MULTILINE)
    assert len(held) == 2
    return round(sum(float(value) for value in held))


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "not streaming"])
async def test_a_slot_is_free_a_second_after_a_disconnect(stack: Stack, step_s: float, stream: bool) -> None:
    await asyncio.to_thread(stack.steady, CHAT, 1)
    body = {
        "model": CHAT,
        "messages": [{"role": "user", "content": "Count as far as you can."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": stream,
    }
    async with httpx.AsyncClient(base_url=stack.base_url, timeout=PATIENCE_S, trust_env=False) as client:

        async def ask() -> None:
            async with client.stream("POST", "/chat/completions", json=body) as answer:
                await answer.aread()

        asking = asyncio.create_task(ask())
        await asyncio.to_thread(eventually, lambda: running(stack) == 1, 120)
        asking.cancel()
        await asyncio.wait([asking])
        await asyncio.to_thread(eventually, lambda: running(stack) == 0, FREED_S + step_s)
    (replica,) = stack.replicas(CHAT)
    eventually(lambda: stack.replicas(CHAT)[0].load.in_flight == 0, 60)
    assert replica.state == "ready"


async def test_a_disconnected_queued_request_never_reaches_the_engine(stack: Stack, step_s: float) -> None:
    """Fill the bound, queue one request, and disconnect it."""
    await asyncio.to_thread(stack.steady, CHAT, 1)
    (replica,) = stack.replicas(CHAT)
    bound = replica.load.bound
    body = {"model": CHAT, "prompt": "go", "max_tokens": 400, "ignore_eos": True, "stream": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=stack.base_url, timeout=PATIENCE_S, limits=limits, trust_env=False
    ) as client:

        async def ask() -> None:
            async with client.stream("POST", "/completions", json=body) as answer:
                await answer.aread()

        holding = [asyncio.create_task(ask()) for _ in range(bound)]
        await asyncio.to_thread(eventually, lambda: running(stack) == bound, 240)
        queued = asyncio.create_task(ask())
        await asyncio.to_thread(eventually, lambda: depth(stack) == 1, 60)
        queued.cancel()
        await asyncio.wait([queued])
        await asyncio.to_thread(eventually, lambda: depth(stack) == 0, FREED_S + step_s)
        assert running(stack) == bound
        for task in holding:
            task.cancel()
        await asyncio.to_thread(eventually, lambda: running(stack) == 0, 240)


def depth(stack: Stack) -> int:
    text = stack.http.get(f"{stack.admin_url}/metrics").text
    return round(
        sum(float(v) for v in re.findall(r"^tidegate_queue_depth\{[^}]*\} ([0-9.]+)$", text, re.MULTILINE))
    )
