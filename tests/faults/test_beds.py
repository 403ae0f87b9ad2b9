"""Shapes that share GPUs change places under streams: nothing is cut, and nobody waits for a start."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.faults.live import MODEL
from tests.faults.scaled import Scaled

pytestmark = pytest.mark.process

START_S, WAKE_S = 5.0, 1.5
RATE = 4.0
SPEC: dict[str, Any] = {
    "sim": {"profile": "h100-8b", "speed": 0.5, "start_s": START_S, "wake_s": WAKE_S},
    "shapes": {"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}},
    "modes": {
        "single-large": {"shape": "large", "replicas": 1},
        "multi-replica": {"shape": "small", "replicas": 2},
    },
    "control": {"policy": "static", "mode": {"drain_timeout_s": 60, "dwell_s": 3600}},
}


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Scaled]:
    stand = Scaled(tmp_path, SPEC, budget={"gpus": 2})
    await stand.start()
    yield stand
    await stand.close()


async def switch(site: Scaled, mode: str) -> None:
    await site.tell("POST", "/mode", {"model": MODEL, "mode": mode})


async def asleep(site: Scaled) -> dict[str, int]:
    """The engines that sleep, by their process id."""
    fleet = await site.tell("GET", "/fleet")
    return {r["id"]: r["pid"] for r in fleet["replicas"] if r["state"] == "asleep"}


async def engines(site: Scaled) -> set[int]:
    """The processes of all engines, awake or not."""
    fleet = await site.tell("GET", "/fleet")
    return {replica["pid"] for replica in fleet["replicas"]}


async def test_there_and_back_under_streams_costs_two_wakes(site: Scaled) -> None:
    await site.load(RATE, {"large": 1}, 90)
    assert len(await asleep(site)) == 2
    running = await engines(site)
    before = len(site.replies)
    await switch(site, "multi-replica")
    await site.load(RATE, {"small": 2}, 60)
    assert len(await asleep(site)) == 1
    await switch(site, "single-large")
    await site.load(RATE, {"large": 1}, 60)
    site.check_replies()
    assert await engines(site) == running
    # No engine was started, so who came in a gap waited for a drain, a wake and some beats.
    waited = max(reply.took_s for reply in site.replies[before:])
    assert waited > WAKE_S / 2


async def test_a_controller_that_is_killed_in_the_gap_goes_on(site: Scaled) -> None:
    await site.load(RATE, {"large": 1}, 90)
    running = await engines(site)
    for mode, goal in (("multi-replica", {"small": 2}), ("single-large", {"large": 1})):
        await switch(site, mode)
        loading = asyncio.create_task(site.load(RATE, goal, 90))
        killed: set[str] = set()
        deadline = time.monotonic() + 60
        while not loading.done() and time.monotonic() < deadline:
            phase = (await site.status())["phase"]
            if phase in ("giving way", "starting") and phase not in killed:
                killed.add(phase)
                await site.end_controller(signal.SIGKILL)
                await site.start_controller()
            await asyncio.sleep(0.02)
        await loading
        assert killed
    site.check_replies()
    assert await engines(site) == running
