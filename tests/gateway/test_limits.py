"""Limits of keys and tenants through real workers: refusals, headers, settling, a burst at two workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.gateway.accounting.test_usage_under_kills import accounting as start_accounting
from tests.gateway.fake_replica import ANSWER, Exchange, hold
from tests.gateway.test_access import CHAT, bearer, tenant
from tests.gateway.worker import Stack, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]

TENANTS = [
    tenant("requests", "key-of-requests", rpm_limit=3),
    tenant("tokens", "key-of-tokens", tpm_limit=1000),
    tenant("parallel", "key-of-parallel", max_parallel_requests=1),
    tenant("budget", "key-of-budget", max_budget=0.00001),
    tenant("tried", "key-of-tried", rpm_limit=1, dry_run=["rpm_limit"]),
    tenant("burst", "key-of-burst", rpm_limit=40),
    tenant("free", "key-of-free"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two workers with a replica."""
    stack = Stack(tmp_path_factory.mktemp("limits"))
    stack.tenants = TENANTS
    stack.models[0]["price"] = {"input": 1.0, "output": 1.0}
    await stack.start_controller()
    await asyncio.gather(stack.start_worker(0), stack.start_worker(1))
    await stack.serve("one")
    await asyncio.sleep(1.0)  # every worker, not only the one that answered
    yield stack
    await stack.close()


async def ask(stack: Stack, name: str, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    """A call on a connection of its own, so that any worker may take it."""
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=30) as client:
        return await client.post(
            path, json={**CHAT, "max_tokens": 10, **more}, headers=bearer(f"key-of-{name}")
        )


async def limits_of(stack: Stack, name: str) -> dict[str, Any]:
    shown = (await stack.admin.get("/admin/limits")).json()["limits"]
    (found,) = [entry for entry in shown if entry["name"] == name]
    assert found["of"] == "tenant"
    limits: dict[str, Any] = found["limits"]
    return limits


async def test_a_request_over_the_limit_is_refused_as_openai_does(two: Stack) -> None:
    first = await ask(two, "requests")
    assert first.status_code == 200
    shown = {name: value for name, value in first.headers.items() if name.startswith("x-ratelimit")}
    assert shown == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "20s",
    }
    assert [(await ask(two, "requests", stream=True)).status_code for _ in range(2)] == [200, 200]
    reached = len(two.replicas[0].hits)
    refused = await ask(two, "requests")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "tenant 'requests': rpm_limit is 3 requests per minute" in refused.json()["error"]["message"]
    assert 15 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    theirs = await ask(two, "requests", "/v1/messages")
    assert (theirs.status_code, theirs.json()["type"]) == (429, "error")
    assert theirs.json()["error"]["type"] == "rate_limit_error"
    assert len(two.replicas[0].hits) == reached
    counted = {"tenant": "requests", "limit": "rpm_limit", "of": "tenant", "outcome": "refused"}
    await two.reaches(2, "tidegate_limit_exceeded_total", **counted)
    assert (await limits_of(two, "requests"))["rpm_limit"]["remaining"] == 0


async def test_tokens_are_settled_to_what_was_used(two: Stack) -> None:
    for more in ({}, {"stream": True}):
        answer = await ask(two, "tokens", max_tokens=900, **more)
        assert answer.status_code == 200
        assert 50 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 100
    used = json.loads(ANSWER)["usage"]["total_tokens"]
    left = (await limits_of(two, "tokens"))["tpm_limit"]["remaining"]
    assert 1000 - 2 * used - 20 <= left <= 1000


async def test_what_is_refused_before_a_replica_had_it_counts_nothing(two: Stack) -> None:
    before = (await limits_of(two, "tokens"))["tpm_limit"]["remaining"]
    answer = await ask(two, "tokens", max_tokens=900, model="unknown")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await limits_of(two, "tokens"))["tpm_limit"]["remaining"] >= before


async def test_requests_at_a_time_are_over_before_their_last_byte(two: Stack) -> None:
    for _ in range(20):  # each may go to another worker, at once after the last one
        assert (await ask(two, "parallel")).status_code == 200
    started, release = asyncio.Event(), asyncio.Event()

    async def held(exchange: Exchange) -> None:
        started.set()
        await hold(release)(exchange)

    replica = two.replicas[0]
    normal, replica.answer = replica.answer, held
    try:
        first = asyncio.create_task(ask(two, "parallel"))
        await started.wait()
        assert [(await ask(two, "parallel")).status_code for _ in range(4)] == [429] * 4
        first.cancel()  # a client that leaves frees its place, too
        release.set()
        replica.answer = normal

        async def is_free() -> bool:
            return (await ask(two, "parallel")).status_code == 200

        await until(is_free)
    finally:
        replica.answer = normal
        release.set()


async def test_a_spent_budget_is_refused_without_a_retry(two: Stack) -> None:
    answers = [await ask(two, "budget") for _ in range(8)]
    assert [answer.status_code for answer in answers[:5]] == [200] * 5  # the sixth is over it, at any worker
    for answer in answers[5:]:
        assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
        assert "max_budget is 1e-05, and it is spent" in answer.json()["error"]["message"]


async def test_a_dry_run_is_counted_only_and_no_limits_have_no_headers(two: Stack) -> None:
    answers = [await ask(two, name) for name in ("tried", "tried", "tried", "free")]
    assert {answer.status_code for answer in answers} == {200}
    assert not any(name.startswith("x-ratelimit") for answer in answers for name in answer.headers)
    counted = {"tenant": "tried", "limit": "rpm_limit", "outcome": "dry_run"}
    await two.reaches(2, "tidegate_limit_exceeded_total", **counted)


async def test_two_workers_under_a_burst_admit_what_the_limit_allows(two: Stack) -> None:
    began = time.monotonic()
    answers = await asyncio.gather(*(ask(two, "burst") for _ in range(120)))
    elapsed_s = time.monotonic() - began
    served = [answer.status_code for answer in answers].count(200)
    # A reservation that two workers make at one moment may refuse both.
    assert 38 <= served <= 40 + elapsed_s * 40 / 60
    assert {answer.status_code for answer in answers} == {200, 429}


@pytest.mark.long
async def test_two_hosts_under_a_burst_admit_what_is_documented(tmp_path: Path, postgresql_url: str) -> None:
    stacks = [Stack(tmp_path / host, host) for host in ("127.0.0.2", "127.0.0.3")]
    accounts: list[asyncio.subprocess.Process] = []
    served = [0, 0]

    async def load(number: int, until_s: float) -> None:
        while time.monotonic() < until_s:
            answers = await asyncio.gather(*(ask(stacks[number], "burst") for _ in range(4)))
            served[number] += sum(answer.status_code == 200 for answer in answers)
            await asyncio.sleep(0.1)

    try:
        for stack in stacks:
            stack.tenants, stack.store = [tenant("burst", "key-of-burst", rpm_limit=240)], postgresql_url
            await stack.start_controller()
            await asyncio.gather(stack.start_worker(0), stack.start_worker(1))
            accounts.append(await start_accounting(stack.root))
            await stack.serve("one")
        # Both hosts are met before a lease of one that began alone could have ended.
        await asyncio.sleep(8.0)
        began = time.monotonic()
        await asyncio.gather(load(0, began + 30), load(1, began + 30))
        elapsed_s = time.monotonic() - began
        # The whole limit once and its refill; each host admits one request without a lease.
        assert sum(served) <= 240 + 4 * elapsed_s + 2, served
        assert min(served) > 0.15 * sum(served) and sum(served) > 4 * elapsed_s, served
        shares = [(await limits_of(stack, "burst"))["rpm_limit"]["share"] for stack in stacks]
        assert sum(shares) == pytest.approx(1.0, abs=0.05), shares
    finally:
        for process in accounts:
            process.kill()
            await process.wait()
        for stack in stacks:
            await stack.close()
