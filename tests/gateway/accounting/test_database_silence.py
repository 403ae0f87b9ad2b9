"""A database that falls silent holds up no more than what asks for it, and that not for long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.applications import Starlette

from gateway.accounting.app import route
from gateway.accounting.database_access import DatabaseAccess
from gateway.accounting.periodic_runner import PeriodicTasks
from policy.errors import Unreachable


@pytest.fixture
async def silent() -> AsyncIterator[None]:
    """All threads of the event loop's executor wait for the database."""
    answers = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    waiting = loop.run_in_executor(None, answers.wait)
    yield
    answers.set()
    await waiting


@pytest.mark.usefixtures("silent")
async def test_periodic_work_goes_on_beside_work_that_waits() -> None:
    published, answers = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    tasks = PeriodicTasks(lambda: None)
    tasks.start("leases", 0.01, answers.wait)
    tasks.start("ledger_metrics", 0.01, lambda: loop.call_soon_threadsafe(published.set))
    async with asyncio.timeout(10):
        await published.wait()
    answers.set()
    await tasks.close()
    assert tasks.failure is None


@pytest.mark.usefixtures("silent")
async def test_the_status_is_answered_while_all_threads_wait() -> None:
    with ThreadPoolExecutor(1) as thread:
        app = Starlette(routes=[route("GET", "/ledger", lambda _request, _body: {"waiting": 3}, thread)])
        transport = httpx.ASGITransport(app)
        async with asyncio.timeout(10), httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            assert (await client.get("/ledger")).json() == {"waiting": 3}


class ObservedLock:
    """A lock that says when somebody wants it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.wanted = threading.Semaphore(0)

    def __enter__(self) -> None:
        self.wanted.release()
        self._lock.acquire()

    def __exit__(self, *_error: object) -> None:
        self._lock.release()


def test_those_that_wait_for_a_failed_attempt_do_not_wait_for_one_more_each() -> None:
    tried, fails = list[int](), threading.Event()

    def url() -> str:
        tried.append(1)
        fails.wait()
        return "nonsense"

    access, lock = DatabaseAccess(url), ObservedLock()
    access._opening = lock  # type: ignore[assignment]
    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(access.get) for _ in range(3)]
        for _ in asking:
            lock.wanted.acquire()
        fails.set()
        for each in asking:
            with pytest.raises(Unreachable, match="expected sqlite:///PATH"):
                each.result()
    assert len(tried) == 1
    with pytest.raises(Unreachable):
        access.get()
    assert len(tried) == 2, "a later call tries again"
