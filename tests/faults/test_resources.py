"""Rows 38 and 39: exhausted resources of the machine, and changes of the wall clock."""

from __future__ import annotations

import asyncio
import itertools
import resource
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.intake.usage_journal import UsageCharge, UsageJournal
from gateway.protocol.usage import TokenUsage
from gateway.telemetry.structured_log import StructuredLog
from policy.tenancy.price import TokenRates
from policy.wire.accounting_api import KEYS, TENANTS, USAGE
from store.state_dir import StateDir
from tests.faults import faults
from tests.faults.harness import Harness
from tests.gateway.accounting.test_usage_under_kills import accounting
from tests.gateway.fake_replica import Exchange
from tests.gateway.worker import PATIENCE_S, until

pytestmark = pytest.mark.process
QUEUE_S = 1.0
FIRST_S = 1.0
EJECT_S = 1.0
SLACK_S = 1.5


@pytest_asyncio.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    made = Harness(
        tmp_path,
        {
            "queue_timeout_s": QUEUE_S,
            "first_token_timeout_s": FIRST_S,
            "eject": {"failures": 3, "base_s": EJECT_S},
        },
    )
    await made.start_controller()
    yield made
    await made.close()


@contextmanager
def limited(pid: int, which: int, soft: int) -> Iterator[None]:
    usual = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (soft, usual[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, which, usual)


def first_free(pid: int) -> int:
    used = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return next(number for number in itertools.count() if number not in used)


async def test_38_a_worker_without_file_descriptors_refuses_and_recovers(harness: Harness) -> None:
    """Over HTTP, where a request may need a connection; by frames none does."""
    worker = await harness.start_worker()
    model = harness.fresh_model()
    (one,) = await harness.fleet(model, 1, frames=False)
    # The worker has opened its files, so that only connections need descriptors.
    await harness.samples("tidegate_in_flight")
    async with harness.expect(model) as after:
        only = first_free(worker.pid)
        with limited(worker.pid, resource.RLIMIT_NOFILE, only + 1):
            refused = 0
            while refused < 5:  # something else of the worker's may have had the descriptor for a moment
                async with asyncio.timeout(PATIENCE_S):
                    client = await harness.post(model)
                    while await client.read():
                        pass
                assert client.reply.status in (0, 503)
                refused += client.reply.status == 503
                await until(lambda: first_free(worker.pid) == only, "its descriptor is free again")
            crowd = [await harness.post(model) for _ in range(20)]
            await asyncio.sleep(0.2)
        assert not one.log
        for client in crowd:  # served late, refused with 503, or closed without a response
            while await client.read():
                pass
            assert client.reply.status in (0, 200, 503)
        assert await harness.admissible(one.id)
        assert (await harness.ask(model, stream=True)).status == 200
        assert set(await after.outcomes()) <= {"ok", "exhausted"}
    assert worker.returncode is None


async def test_38_a_lost_connection_is_no_death_while_descriptors_lack(harness: Harness) -> None:
    worker = await harness.start_worker()
    model = harness.fresh_model()
    (one,) = await harness.fleet(model, 1, frames=False)
    lacking = asyncio.Event()

    async def reset(exchange: Exchange) -> None:
        await lacking.wait()
        exchange.reset()

    one.usual = reset
    async with harness.expect(model, {"exhausted": 1}, attempts=1):
        client = await harness.post(model)
        await until(lambda: bool(one.open), "the request has arrived")
        with limited(worker.pid, resource.RLIMIT_NOFILE, 3):
            lacking.set()
            while await client.read():
                pass
        assert client.reply.status == 503
        (sample,) = await harness.samples("tidegate_replica_attempts_total", model=model)
        assert sample == ({"model": model, "outcome": "dropped"}, 1.0)
        (sample,) = await harness.samples("tidegate_replica_resets_total", model=model)
        assert sample[1] == 1.0


async def test_38_a_full_disk_does_not_stop_requests(harness: Harness) -> None:
    """Serving needs no write: requests continue, and unsaved state is saved later."""
    worker = await harness.start_worker()
    model = harness.fresh_model()
    (one,) = await harness.fleet(model, 1)
    saved = harness.root / "fleet.json"
    await until(lambda: saved.exists() and one.id in saved.read_text(), "the fleet is on disk")
    async with harness.expect(model, {"ok": 40}, attempts=40):
        with limited(worker.pid, resource.RLIMIT_FSIZE, 0):
            for _ in range(20):
                assert (await harness.ask(model)).status == 200
            (two,) = await harness.fleet(model, 1)
            for _ in range(20):
                assert (await harness.ask(model)).headers["x-tidegate-replica"] == two.id
            await asyncio.sleep(1.5)  # it tries to save the new fleet
            assert two.id not in saved.read_text()
        await until(lambda: two.id in saved.read_text(), "the fleet is saved")
    assert worker.returncode is None


JUMPS = '''
"""A wall clock that is set by a day back and forth, twice a second."""
import os, pathlib, time

_real, _real_ns, _mono = time.time, time.time_ns, time.monotonic


def _offset():
    return (0, 86_400, 0, -86_400)[int(_mono() * 4) % 4]


time.time = lambda: _real() + _offset()
time.time_ns = lambda: _real_ns() + _offset() * 10**9
pathlib.Path(os.environ["CLOCK_THAT_JUMPS"]).touch()
'''


@pytest.mark.parametrize(
    "jumps", [pytest.param(False, marks=pytest.mark.long), True], ids=["as it is", "jumping"]
)
async def test_39_deadlines_and_breakers_use_the_monotonic_clock(harness: Harness, jumps: bool) -> None:
    mark = harness.root / "the-clock-jumps"
    if jumps:
        (harness.root / "sitecustomize.py").write_text(JUMPS)
        harness.environment = {"PYTHONPATH": str(harness.root), "CLOCK_THAT_JUMPS": str(mark)}
    await harness.start_worker()
    assert mark.exists() == jumps
    model = harness.fresh_model()
    bad, good = await harness.fleet(model, 2, bound=2)
    async with harness.expect(model) as after:
        for _ in range(4):  # the service time is known, so that no request is refused by an estimate
            assert (await harness.ask(model)).status == 200
        # A deadline in the queue: four requests hold all slots.
        bad.usual = good.usual = faults.paced(1, 0, first_s=2 * QUEUE_S)
        holders = [await harness.post(model) for _ in range(4)]
        await until(lambda: len(bad.open) + len(good.open) == 4)
        reply = await harness.ask(model)
        assert reply.status == 503
        assert QUEUE_S * 0.9 <= reply.took_s <= QUEUE_S + SLACK_S + after.stalls.seconds
        for holder in holders:
            assert (await holder.end()).status == 200
        # The first token's deadline, and a breaker: three failures, some time without it, a probe.
        bad.report(bound=64)
        good.report(bound=64)
        good.usual = faults.paced(1, 0)
        bad.usual = faults.stalling()
        for _ in range(3):
            await harness.prefer(bad)
            reply = await harness.ask(model, stream=True)
            assert reply.headers["x-tidegate-replica"] == good.id
            assert FIRST_S * 0.9 <= reply.took_s <= FIRST_S + SLACK_S + after.stalls.seconds
        opened = [hit.left_at for hit in bad.log][-1]
        assert opened is not None
        assert not await harness.admissible(bad.id)
        bad.usual = faults.reply()
        await until(lambda: harness.admissible(bad.id), "it is back")
        asked = bad.probes[0].at - opened
        stalls_s = after.stalls.seconds
        assert EJECT_S * 0.8 - stalls_s <= asked <= EJECT_S + SLACK_S + stalls_s
        assert set(await after.outcomes()) <= {"ok", "deadline", "overloaded"}
    assert harness.workers[0].returncode is None
    harness.workers[0].send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(harness.workers[0].wait(), 60) == 0


@contextmanager
def full_disk(process: asyncio.subprocess.Process) -> Iterator[None]:
    with limited(process.pid, resource.RLIMIT_FSIZE, 0):
        yield


@contextmanager
def no_descriptors(process: asyncio.subprocess.Process) -> Iterator[None]:
    with limited(process.pid, resource.RLIMIT_NOFILE, first_free(process.pid)):
        yield


@pytest.mark.parametrize(
    ("exhausted", "refused"),
    [(full_disk, 503), pytest.param(no_descriptors, 0, marks=pytest.mark.long)],
)
async def test_38_the_accounting_process_refuses_changes_and_loses_no_usage(
    tmp_path: Path,
    exhausted: Callable[[asyncio.subprocess.Process], AbstractContextManager[None]],
    refused: int,
) -> None:
    state = StateDir(tmp_path)
    process = await accounting(tmp_path, PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "metrics"))
    journal = UsageJournal(state.usage_path, StructuredLog(0, StringIO()))

    async def ask(method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Status and answer; status 0 without an answer."""
        transport = httpx.AsyncHTTPTransport(uds=str(state.accounting_socket_path))
        async with httpx.AsyncClient(transport=transport, base_url="http://accounting", timeout=10) as client:
            try:
                answer = await client.request(method, path, json=body)
            except httpx.HTTPError:
                return 0, None
            return answer.status_code, answer.json()

    async def makes(path: str, body: object) -> bool:
        return (await ask("POST", path, body))[0] == 200

    def spend() -> None:
        charge = UsageCharge(journal, "web", "", "m", "", TokenRates(0, 0, 0), 0)
        charge.begin()
        charge.end(TokenUsage(0, 0, 1))

    async def drained(tokens: int) -> bool:
        _, rows = await ask("GET", USAGE)
        return [row["output_tokens"] for row in rows] == [tokens]

    try:
        await until(lambda: makes(TENANTS, {"name": "web"}), "the accounting process answers")
        spend()
        await until(lambda: drained(1), "usage is in the ledger")
        await asyncio.sleep(0.3)  # its end of the last connection is closed
        with exhausted(process):
            assert (await ask("POST", KEYS, {"tenant": "web"}))[0] == refused
            for _ in range(10):
                spend()
            await asyncio.sleep(1.2)  # it tries to write the ledger, and its metrics
        await until(lambda: makes(KEYS, {"tenant": "web"}), "keys are made again")
        assert len((await ask("GET", KEYS))[1]) == 1, "what was refused changed nothing"
        await until(lambda: drained(11), "no usage was lost or counted twice")
    finally:
        journal.close()
        assert process.returncode is None
        process.kill()
        await process.wait()
