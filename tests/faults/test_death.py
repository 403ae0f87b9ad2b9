"""Rows 23 to 26 and 31: engines and hosts that are killed, stopped, silent or flapping."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio

from serve.state.replica_registry import HUNG_S
from store.os_process import find
from tests.faults import faults
from tests.faults.alerts import raises
from tests.faults.harness import Harness
from tests.faults.live import MODEL, Live, host_of, send
from tests.faults.raw_client import Reply
from tests.gateway.fake_replica import Exchange
from tests.gateway.worker import until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
FIRST_S, PROGRESS_S, OUT_S, START_S = 5.0, 2.0, 2.0, 60.0
GATEWAY = {
    "connect_timeout_s": 0.5,
    "first_token_timeout_s": FIRST_S,
    "inter_token_timeout_s": FIRST_S,
    "progress_timeout_s": PROGRESS_S,
    "queue_timeout_s": 15,
    "eject": {"base_s": 0.5, "max_s": 4.0},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory, gateway: dict[str, Any]) -> AsyncIterator[Live]:
    async with Live(tmp_path_factory.mktemp("live"), gateway).running(2) as live:
        yield live


@pytest.mark.parametrize("what", ["engine", "host"])
async def test_23_24_a_killed_engine_or_host_fails_only_started_streams(live: Live, what: str) -> None:
    """Requests that have a byte get an error event; all others are served elsewhere."""
    fleet = await live.settle(2)
    before = await live.scrape()
    victim = min(fleet)
    async with live.expect(MODEL) as after:
        streams = await live.streams(MODEL, 6, 2, max_tokens=200, ignore_eos=True)
        held = [stream for stream in streams if stream.reply.headers["x-tidegate-replica"] == victim]
        assert 0 < len(held) < len(streams)
        whole = [await live.post(MODEL, max_tokens=100, ignore_eos=True) for _ in range(6)]
        await asyncio.sleep(0.2)
        engine = fleet[victim]["pid"]
        killed_at = send(engine if what == "engine" else host_of(engine), signal.SIGKILL)
        gone_at = await live.out_of_rotation(victim)
        assert gone_at - killed_at <= OUT_S + after.stalls.seconds
        later = [live.ask(MODEL, max_tokens=1) for _ in range(10)]
        replies: list[Reply] = await asyncio.gather(*(one.end() for one in (*streams, *whole)), *later)
        for stream in streams:
            assert (stream.reply.error is not None) == (stream in held)
        assert {reply.status for reply in replies[len(streams) :]} == {200}
        outcomes = await after.outcomes()
        assert outcomes == {"ok": len(replies) - len(held), "stream_broken": len(held)}
        back = await live.settle(2)
        (new,) = set(back) - (set(fleet) - {victim})
        assert (new == victim) == (what == "engine")  # an engine is restarted in place
        assert back[new]["pid"] != engine
        await until(lambda: not psutil.pid_exists(engine), "an engine ends with its host")
        await live.serves(MODEL, new)
    if what == "engine":
        raises(live.root, "TidegateCrashLoop", before, await live.scrape(), model=MODEL)


async def stop_an_engine(live: Live, stop_s: float) -> None:
    """Stop an engine with requests on it; they are served elsewhere, and later it serves again."""
    fleet = await live.settle(2)
    async with live.expect(MODEL) as after:
        holding = [await live.post(MODEL, max_tokens=60, ignore_eos=True) for _ in range(6)]
        await asyncio.sleep(0.1)
        victim = min(fleet)
        stopped_at = send(fleet[victim]["pid"], signal.SIGSTOP)
        gone_at = await live.out_of_rotation(victim)
        assert gone_at - stopped_at <= PROGRESS_S + OUT_S + after.stalls.seconds
        during = await asyncio.gather(*(live.ask(MODEL, max_tokens=2) for _ in range(10)))
        assert {reply.headers["x-tidegate-replica"] for reply in during} == set(fleet) - {victim}
        replies = await asyncio.gather(*(one.end() for one in holding))
        assert {reply.status for reply in replies} == {200}
        await asyncio.sleep(max(0.0, stopped_at + stop_s - time.monotonic()))
        send(fleet[victim]["pid"], signal.SIGCONT)
        await live.serves(MODEL, victim)
        assert set(await after.outcomes()) == {"ok"}


async def test_25_requests_on_a_stopped_engine_are_served_elsewhere(live: Live) -> None:
    await stop_an_engine(live, 4.0)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_25_an_engine_stopped_for_a_minute_serves_again(live: Live) -> None:
    await stop_an_engine(live, 50.0)  # its own host would restart it after 60 s


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_25_a_stopped_host_is_replaced(live: Live) -> None:
    """A host that hangs sends no heartbeats; its engine goes on until both are replaced."""
    fleet = await live.settle(2)
    victim = min(fleet)
    async with live.expect(MODEL) as after:
        stopped_at = send(host_of(fleet[victim]["pid"]), signal.SIGSTOP)

        async def replaced() -> bool:
            there = await live.replicas_ready()
            return len(there) == 2 and victim not in there

        await until(replaced, "another host is ready")
        assert time.monotonic() - stopped_at <= HUNG_S + START_S + after.stalls.seconds
        assert find(fleet[victim]["pid"]) is None
        await live.settle(2)
        assert (await live.ask(MODEL, max_tokens=2)).status == 200


async def test_26_a_healthy_replica_that_answers_nothing_is_ejected(harness: Harness, model: str) -> None:
    bad, good = await harness.fleet(model, 2)
    bad.usual = faults.silent
    await harness.prefer(bad)
    async with harness.expect(model) as after:
        first = await harness.post(model, stream=True)
        await until(lambda: len(bad.open) == 1)
        await harness.shows(bad, admissible=False)
        seen_s = time.monotonic() - bad.log[0].at
        stalls_s = after.stalls.seconds
        assert PROGRESS_S * 0.9 - stalls_s <= seen_s <= PROGRESS_S + 1.5 + stalls_s
        hits = len(bad.log)
        during = await asyncio.gather(*(harness.ask(model) for _ in range(20)))
        assert {reply.headers["x-tidegate-replica"] for reply in during} == {good.id}
        assert len(bad.log) - hits <= 1  # a probe
        assert (await first.end()).headers["x-tidegate-replica"] == good.id
        bad.usual = faults.reply()
        await harness.serves(model, bad.id)
        assert set(await after.outcomes()) == {"ok"}


async def test_31_a_flapping_replica_is_ejected_longer_each_time(harness: Harness, model: str) -> None:
    """Each ejection is longer than the one before, although the probes succeed."""
    rest_s, lasts_s, well = 0.4, 6.0, 8
    fleet = await harness.fleet(model, 3, usual=faults.paced(1, 0.005))
    flapping = fleet[0]
    asked_at = math.inf
    returns = since = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal asked_at, returns, since
        now = time.monotonic()
        if now - asked_at > rest_s:  # the probe after an ejection
            returns += 1
            since = 0
        asked_at = now
        since += 1
        await (faults.paced(1, 0.005) if since <= well else faults.status(500))(exchange)

    flapping.usual = answer
    async with harness.expect(model) as after:
        asking = True

        async def ask() -> None:
            while asking:
                await harness.ask(model)

        asked = [asyncio.create_task(ask()) for _ in range(6)]
        await asyncio.sleep(lasts_s)
        asking = False
        await asyncio.gather(*asked)
        outcomes = await after.outcomes()
        requests = outcomes.total()
        retries = await after.attempts() - requests
    assert outcomes["ok"] >= 0.99 * requests
    # With 0.5 s, 1 s, 1.5 s ... out of it there is no time for more.
    assert 1 <= returns <= 5
    assert retries <= 0.2 * requests
