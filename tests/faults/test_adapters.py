"""Rows 48 to 50: adapters that a replica cannot load, unknown ones, and those of another tenant.

The replicas' own part, from files that are missing to 200 requests for one load, is in ``tests/serve``.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import httpx
import psutil
import pytest
import pytest_asyncio

from gateway.routing.loaded_adapters import FAILED_S
from policy.wire.adapter_catalog import served_name
from tests.faults import faults
from tests.faults.harness import Harness
from tests.gateway.fake_replica import Answer, Exchange, alias

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
DIGEST = hashlib.sha256(b"an adapter").hexdigest()
MINE, OTHERS, ADMINS = "key-of-mine", "key-of-others", "key-of-admins"
RANDOM_NAMES, ROUND, CLIENTS = 12_000, 3_000, 8
# Slack of the allocator; the names of a round would take more if they were stored.
FLAT_BYTES = 256 * 1024


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory, tests: int) -> AsyncIterator[Harness]:
    """A worker for models that take adapters, and for tenants of whom one has an adapter of its own."""
    root = tmp_path_factory.mktemp("adapters")
    harness = Harness(root, tests=tests, adapters={"slots_per_replica": 4})
    harness.tenants = [
        {"name": name, "keys_sha256": [hashlib.sha256(key.encode()).hexdigest()], "admin": key == ADMINS}
        for name, key in (("mine", MINE), ("others", OTHERS), ("admins", ADMINS))
    ]
    harness.http.headers["connection"] = "close"  # no adapter of an earlier test
    await harness.start_controller()
    await harness.start_worker()
    yield harness
    await harness.close()


def refusing(usual: Answer) -> Answer:
    async def answer(exchange: Exchange) -> None:
        if "x-tidegate-adapter" in exchange.headers:
            await exchange.refuse("adapter_failed", "files_missing: they are gone")
        else:
            await usual(exchange)

    return answer


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


async def test_48_requests_go_to_the_replica_that_can_load_the_adapter(harness: Harness, model: str) -> None:
    good = faults.reply()
    bad, works = await harness.fleet(model, 2)
    bad.usual, works.usual = refusing(good), good
    await harness.publish(alias("sql", DIGEST, model=model), key=ADMINS)
    async with harness.expect(model) as after:
        began = time.monotonic()
        asked = 0
        while time.monotonic() < began + 2.5 * FAILED_S:
            replies = await asyncio.gather(
                *(
                    harness.ask(model=name, headers=bearer(OTHERS))
                    for name in ("sql", f"{model}:sql", "sql", model)
                )
            )
            asked += len(replies)
            assert {reply.status for reply in replies} == {200}
            assert {reply.headers["x-tidegate-replica"] for reply in replies[:3]} == {works.id}
        tried = [hit for hit in bad.log if "x-tidegate-adapter" in hit.exchange.headers]
        lasted = time.monotonic() - began
        # Three requests are concurrent; each expiry of the failure mark allows another attempt.
        assert 1 <= len(tried) <= 3 * (2 + lasted / FAILED_S)
        assert await after.outcomes() == Counter({"ok": asked})
        assert not await harness.ejections(model), "it stays admissible for other requests"


async def test_48_an_adapter_that_no_replica_can_load_fails(harness: Harness, model: str) -> None:
    good = faults.reply()
    fleet = await harness.fleet(model, 2)
    for one in fleet:
        one.usual = refusing(good)
    await harness.publish(alias("sql", DIGEST, model=model), key=ADMINS)
    async with harness.expect(model, {"adapter_failed": 40, "ok": 40}):
        for _ in range(40):
            reply = await harness.ask("sql", headers=bearer(OTHERS))
            assert (reply.status, reply.json["error"]["code"]) == (503, "adapter_failed")
            assert "files_missing" in reply.json["error"]["message"]
            assert (await harness.ask(model, headers=bearer(OTHERS))).status == 200


def random_names(count: int) -> list[str]:
    draw = random.Random(49)  # noqa: S311 - the same names each time
    forms = itertools.cycle(
        (
            "{word}",
            "row-0:{word}",
            "{word}@{digest}",
            "row-0:{word}@{digest}",
            "{word}:{word}",
            "sql@{digest}",
            "../{word}/%2e%2e",
            "{word}" * 20,
            "é{word}\u2028",
        )
    )
    return [
        next(forms).format(word=f"{draw.getrandbits(64):x}", digest=f"{draw.getrandbits(256):064x}")
        for _ in range(count)
    ]


async def ask_all(harness: Harness, names: Sequence[str]) -> Counter[tuple[int, str]]:
    """Ask for each name, on a few connections that are kept; the answers by status and code."""
    found: Counter[tuple[int, str]] = Counter()

    async def client(own: Sequence[str]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port)
        for name in own:
            body = json.dumps({"model": name, "messages": [{"role": "user", "content": "hi"}]}).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {OTHERS}\r\n"
                f"x-tidegate-adapter: sql@{DIGEST}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.partition(b":")[2])
                for line in answer.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            )
            error = json.loads(await reader.readexactly(length))["error"]
            assert error["message"] == f"The model '{name[:128]}' does not exist."
            found[int(answer[9:12]), error["code"]] += 1
        writer.close()
        await writer.wait_closed()

    await asyncio.gather(*(client(names[i::CLIENTS]) for i in range(CLIENTS)))
    return found


async def series_of(harness: Harness) -> set[str]:
    """The time series of a scrape."""
    return {line.rpartition(" ")[0] for line in (await harness.scrape()).splitlines()}


async def test_49_ten_thousand_random_model_names_take_no_memory(harness: Harness, model: str) -> None:
    (one,) = await harness.fleet(model, 1)
    await harness.publish(alias("sql", DIGEST, model=model), key=ADMINS)
    process = psutil.Process(harness.workers[0].pid)
    names = random_names(RANDOM_NAMES)
    found = await ask_all(harness, names[:ROUND])
    series = await series_of(harness)
    grown: list[int] = []
    for first in range(ROUND, RANDOM_NAMES, ROUND):
        memory = process.memory_info().rss
        found += await ask_all(harness, names[first : first + ROUND])
        grown.append(process.memory_info().rss - memory)

    assert found == Counter({(404, "model_not_found"): RANDOM_NAMES})
    # Names would add a series each; a first slow answer may add that of its bucket.
    added = await series_of(harness) - series
    assert len(added) < 10, added
    # What names cost would be taken in each round, unlike the steps of an allocator.
    assert statistics.median(grown) < FLAT_BYTES, grown
    assert one.log == []
    assert (await harness.ask("sql", headers=bearer(OTHERS))).status == 200


FORMS = ("secret", "{model}:secret", "secret@{short}", "secret@{digest}", "{model}:secret@{digest}")
FORGED = {
    "x-tidegate-adapter": f"secret@{DIGEST}",
    "x-tidegate-tenant": "mine",
    "x-tenant": "mine",
    "x-session-id": "mine",
    "x-tidegate-secret": "guess",
}


async def test_50_another_tenants_adapter_looks_like_an_unknown_one(harness: Harness, model: str) -> None:
    (one,) = await harness.fleet(model, 1)
    one.report(adapters=[served_name("secret", DIGEST)])
    names = [form.format(model=model, short=DIGEST[:12], digest=DIGEST) for form in FORMS]
    private = alias("secret", DIGEST, model=model, tenants=["mine"])

    async def responses() -> list[tuple[int, bytes, list[str]]]:
        replies = [
            await harness.ask(name, path=path, headers=bearer(OTHERS, **more))
            for name in names
            for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/tokenize")
            for more in ({}, FORGED)
        ]
        return [(reply.status, reply.body, sorted(reply.headers)) for reply in replies]

    await harness.publish(key=ADMINS)
    absent = await responses()
    await harness.publish(private, key=ADMINS)
    hidden = await responses()
    assert hidden == absent
    assert {status for status, _, _ in hidden} == {404}
    for name in names:
        answer = await harness.http.get(f"/v1/models/{name}", headers=bearer(OTHERS, **FORGED))
        assert answer.status_code == 404
    assert b"secret" not in (await harness.http.get("/v1/models", headers=bearer(OTHERS, **FORGED))).content
    assert one.log == []
    # Client headers do not change its access either.
    assert (await harness.ask(model, headers=bearer(OTHERS, **FORGED))).status == 200
    assert "x-tidegate-adapter" not in one.log[-1].exchange.headers
    for key in (MINE, ADMINS):
        assert (await harness.ask("secret", headers=bearer(key))).status == 200
        assert one.log[-1].exchange.headers["x-tidegate-adapter"] == f"secret@{DIGEST}"


@pytest.mark.long
async def test_50_latency_does_not_reveal_another_tenants_adapter(harness: Harness, model: str) -> None:
    await harness.fleet(model, 1)
    await harness.publish(alias("secret", DIGEST, model=model, tenants=["mine"]), key=ADMINS)
    took: dict[str, list[float]] = {"secret": [], "absent": []}
    async with httpx.AsyncClient(base_url=harness.url, trust_env=False, headers=bearer(OTHERS)) as client:
        for _ in range(400):
            for name, times in took.items():
                began = time.perf_counter()
                reply = await client.post("/v1/completions", json={"model": name})
                times.append(time.perf_counter() - began)
                assert reply.status_code == 404
    hidden, absent = (statistics.median(times) for times in took.values())
    assert abs(hidden - absent) < 0.2 * absent


async def test_a_catalog_of_many_adapters_is_followed_and_listed(harness: Harness, model: str) -> None:
    (one,) = await harness.fleet(model, 1)
    many = [
        alias(
            f"adapter-{i}",
            hashlib.sha256(b"%d" % i).hexdigest(),
            model=model,
            tenants=["mine"] if i % 2 else [],
        )
        for i in range(5000)
    ]
    await harness.publish(*many, key=ADMINS)
    listed = (await harness.http.get("/v1/models", headers=bearer(OTHERS))).json()["data"]
    assert sum(entry["parent"] == model for entry in listed) == 2500
    for i in (0, 2498, 4998):
        assert (await harness.ask(f"adapter-{i}", headers=bearer(OTHERS))).status == 200
        assert (await harness.ask(f"adapter-{i + 1}", headers=bearer(OTHERS))).status == 404
    assert len(one.log) == 3
