"""Workers of a host share slots: priorities are strict, and no slot is idle that a waiting request could use.

The queues of gateway workers over shared counts, without a network and in virtual time.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.routing.shared_counters import BEAT_EVERY_S, LOCAL, SharedCounts, SharedRows
from policy.types import Priority
from tests.gateway.queue.test_admission import Queues, end
from tests.gateway.virtual_time import run_virtual

# The longest time for which a slot may be idle while a request waits.
IDLE_S = 0.1
RANK = list(Priority)


class Arrival(NamedTuple):
    at: float
    lasts_s: float = 1.0
    tenant: str = "a"
    priority: Priority = Priority.STANDARD
    worker: int = 0
    tokens: int = 10


class Served(NamedTuple):
    arrival: Arrival
    asked: float
    began: float
    ended: float


def serve(path: Path, arrivals: Iterable[Arrival], slots: int, workers: int = 1) -> list[Served]:
    """Serve all requests on two replicas with ``slots`` between them."""
    served: list[Served] = []
    path.unlink(missing_ok=True)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        rows: list[SharedCounts] = [LOCAL]
        if workers > 1:
            rows = [SharedRows(path, i, lambda: 1.0 + loop.time()) for i in range(workers)]
        with ExitStack() as stack:
            for row in rows:
                stack.callback(row.close)
            queues = [Queues(10_000, bound=slots // 2, replicas=2, shared=row) for row in rows]

            async def beat() -> None:
                while True:
                    for row in rows:
                        row.beat()
                    await asyncio.sleep(BEAT_EVERY_S)

            async def ask(arrival: Arrival) -> None:
                await asyncio.sleep(arrival.at)
                asked = loop.time()
                queue = queues[arrival.worker]
                ticket = queue.arrive(
                    queue.alpha,
                    size=0,
                    deadline=float("inf"),
                    tenant=arrival.tenant,
                    priority=arrival.priority,
                    prompt_tokens=arrival.tokens,
                )
                await ticket.wait()
                began = loop.time()
                await asyncio.sleep(arrival.lasts_s)
                end(ticket)
                served.append(Served(arrival, asked, began, loop.time()))

            beating = asyncio.create_task(beat())
            await asyncio.gather(*map(ask, arrivals))
            beating.cancel()

    run_virtual(main)
    return served


def inversions(served: list[Served]) -> list[tuple[Served, Served]]:
    """Requests that began while others of a higher priority waited, with one of those."""
    return [
        (first, late)
        for first in served
        for late in served
        if RANK.index(late.arrival.priority) < RANK.index(first.arrival.priority)
        and late.asked < first.began < late.began
    ]


def idle_s(served: list[Served], slots: int) -> float:
    """The longest time for which a slot was idle while a request waited for it."""
    changes = [
        change
        for _, asked, began, ended in served
        for change in ((ended, "ends"), (asked, "waits"), (began, "x begins"))
    ]
    free, waiting, longest = slots, 0, 0.0
    wanted: deque[float] = deque()  # since when each idle slot is wanted
    for at, what in sorted(changes):
        if what == "x begins":
            free, waiting = free - 1, waiting - 1
            assert free >= 0, "more run than there are slots"
            longest = max(longest, at - wanted.popleft())
        elif what == "ends":
            free += 1
        else:
            waiting += 1
        if len(wanted) < min(free, waiting):
            wanted.append(at)
    return longest


def random_arrivals(rng: random.Random, slots: int, workers: int) -> list[Arrival]:
    """One and a half times what the slots can serve, of three tenants and two priorities."""
    at, arrivals = 0.0, []
    for _ in range(2 * slots + 16):
        at += rng.expovariate(1.5 * slots)
        priority = rng.choice((Priority.CRITICAL, Priority.BATCH))
        tenant = rng.choices("abc", (10, 1, 1))[0]
        lasts_s = rng.expovariate(1.0)
        arrivals.append(Arrival(at, lasts_s, tenant, priority, rng.randrange(workers), rng.randint(1, 500)))
    return arrivals


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 8])
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(slots=st.sampled_from([2, 4, 8, 16, 64]), seed=st.integers(0, 10**6))
def test_priorities_are_strict_and_no_slot_is_idle(
    slots: int, seed: int, workers: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)  # noqa: S311 - arrivals, not secrets
    served = serve(tmp_path / "rows", random_arrivals(rng, slots, workers), slots, workers)
    assert not inversions(served)
    assert idle_s(served, slots) <= IDLE_S


@pytest.mark.parametrize("workers", [1, 2])
def test_a_busy_tenants_critical_requests_begin_before_the_batch_of_another(
    workers: int, tmp_path: Path
) -> None:
    """Eight slots, sixteen critical requests that wait, and then eight of the batch, at another worker."""
    arrivals = [Arrival(0.0, 1.0 + i / 10, "busy", Priority.CRITICAL) for i in range(8)]
    arrivals += [Arrival(0.1, 1.0, "busy", Priority.CRITICAL) for _ in range(16)]
    arrivals += [Arrival(0.2, 1.0, "other", Priority.BATCH, workers - 1) for _ in range(8)]
    served = serve(tmp_path / "rows", arrivals, 8, workers)
    assert not inversions(served)
    assert idle_s(served, 8) <= IDLE_S


@pytest.mark.parametrize("slots", [2, 8])
def test_a_tenant_that_is_seldom_there_costs_no_throughput(slots: int, tmp_path: Path) -> None:
    """Two requests of one token in eight seconds, beside a tenant that always waits."""
    busy = [Arrival(0.0, 0.4, "busy") for _ in range(20 * slots)]
    seldom = [Arrival(0.1 + 4 * i, 0.01, "seldom", tokens=1) for i in range(2)]
    served = serve(tmp_path / "rows", busy + seldom, slots)
    took_s = max(each.ended for each in served) - min(each.began for each in served)
    assert took_s <= 1.01 * 0.4 * 20
