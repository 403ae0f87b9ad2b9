"""A key decides the tenant, its weight and its priority; a request decides none of them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.intake.authentication import ACCOUNTS_A_TURN, TenantDirectory
from gateway.intake.principal import WorkerTenant
from gateway.protocol.errors import Refused
from gateway.protocol.usage import TokenUsage
from gateway.routing.shared_counters import LOCAL, SharedRows
from gateway.telemetry.metrics import WorkerMetrics
from policy.deployment_file.parse import parse
from policy.types import Priority
from tests.policy.example_documents import GOOD

SECRET = b"s" * 64
OWN = "our-own-key"


def digest(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def tenant(name: str, *keys: bytes, **more: Any) -> dict[str, Any]:
    return {"name": name, "keys_sha256": [digest(key) for key in keys], **more}


def tenants(*entries: dict[str, Any]) -> TenantDirectory:
    found = TenantDirectory(SECRET, OWN, WorkerMetrics().tenants, LOCAL)
    found.read(parse({**GOOD, "tenants": list(entries)}))
    return found


def account_of(found: TenantDirectory, headers: dict[bytes, bytes]) -> WorkerTenant:
    return found.of(headers).account


def bearer(key: bytes) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key}


def test_without_tenants_every_key_is_the_anonymous_account() -> None:
    found = tenants()
    account = account_of(found, {})
    assert (account.name, account.salt, account.weight, account.admin) == ("", b"", 1.0, False)
    assert account.priority is Priority.STANDARD
    assert account_of(found, bearer(b"anything")) is account


@pytest.mark.parametrize(
    ("gateway", "is_open"),
    [({"host": "0.0.0.0"}, False), ({"host": "0.0.0.0", "allow_unauthenticated": True}, True), ({}, True)],
)
def test_without_tenants_a_port_that_others_reach_is_closed_also_after_the_last_key(
    gateway: dict[str, Any], is_open: bool
) -> None:
    found = tenants()
    found.read(parse({**GOOD, "gateway": gateway, "tenants": [tenant("last", b"k")]}))
    found.read(parse({**GOOD, "gateway": gateway}))
    found.take(found.draft())  # of an empty database
    if is_open:
        assert account_of(found, {}).name == ""
    else:
        with pytest.raises(Refused, match="requires an API key"):
            found.of({})


def test_the_default_priority_follows_the_deployment() -> None:
    accounts = tenants()
    account = account_of(accounts, {})
    for priority in (Priority.CRITICAL, Priority.SHEDDABLE):
        accounts.read(parse({**GOOD, "gateway": {"priority": priority.value}}))
        assert account_of(accounts, {}) is account
        assert account.priority is priority
    accounts.read(parse(GOOD))
    assert account.priority is Priority.STANDARD


@pytest.mark.parametrize(
    "headers",
    [
        {b"authorization": b"Bearer k-1"},
        {b"authorization": b"bearer k-1"},
        {b"authorization": b"BEARER   k-1 "},
        {b"x-api-key": b"k-1"},
        {b"authorization": b"Basic dTpw", b"x-api-key": b"k-1"},
    ],
)
def test_a_key_is_accepted_in_either_header(headers: dict[bytes, bytes]) -> None:
    account = account_of(tenants(tenant("acme", b"k-1", weight=3, priority="critical", admin=True)), headers)
    assert (account.name, account.weight, account.priority, account.admin) == (
        "acme", 3.0, Priority.CRITICAL, True,
    )  # fmt: skip


WRONG = (b"", b"Bearer ", b"Bearer", b"k-1", b"Bearer k-2", b"Bearer k-1 x", b"Bearer \xff\x00")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        *({b"authorization": value} for value in WRONG),
        {b"x-api-key": b""},
        {b"x-api-key": digest(b"k-1").encode()},
        {b"authorization": b"Bearer wrong", b"x-api-key": b"k-1"},
    ],
)
def test_a_wrong_key_is_refused_and_not_echoed(headers: dict[bytes, bytes]) -> None:
    with pytest.raises(Refused) as caught:
        account_of(tenants(tenant("acme", b"k-1")), headers)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert "k-" not in caught.value.message
    anthropic = msgspec.json.decode(caught.value.body(anthropic=True))
    assert anthropic["error"]["type"] == "authentication_error"


def test_tidegates_own_key_is_anonymous() -> None:
    found = tenants(tenant("acme", b"k-1"))
    account = account_of(found, bearer(OWN.encode()))
    assert (account.name, account.admin) == ("", False)
    assert [entry["name"] for entry in asyncio.run(found.describe())] == ["acme"]


def test_a_new_document_revokes_and_admits_at_once_and_keeps_the_counts() -> None:
    found = tenants(tenant("acme", b"k-1"), tenant("bits", b"k-2"))
    acme = account_of(found, bearer(b"k-1"))
    acme.in_flight, acme.prompt_tokens = 2, 70
    found.read(parse({**GOOD, "tenants": [tenant("acme", b"k-3", weight=5)]}))
    for revoked in (b"k-1", b"k-2"):
        with pytest.raises(Refused):
            account_of(found, bearer(revoked))
    assert account_of(found, bearer(b"k-3")) is acme
    assert found.weight("acme") == 5.0
    assert found.weight("bits") == 1.0
    (shown,) = asyncio.run(found.describe())
    assert (shown["in_flight"], shown["prompt_tokens"]) == (2, 70)
    assert digest(b"k-3")[:8] not in str(shown) and "k-3" not in str(shown)


def test_counts_are_summed_over_the_workers_of_the_host(tmp_path: Path) -> None:
    rows = [SharedRows(tmp_path / "rows", i) for i in range(3)]
    workers = [TenantDirectory(SECRET, OWN, WorkerMetrics().tenants, row) for row in rows]
    for number, worker in enumerate(workers, start=1):
        worker.read(parse({**GOOD, "tenants": [tenant("acme", b"k-1"), tenant("bits", b"k-2")]}))
        account_of(worker, bearer(b"k-1")).in_flight = number
        worker.served("acme", TokenUsage(prompt=10 * number, cached=0, completion=100 * number))
        assert not list(worker.share())
    for row, worker in zip(rows, workers, strict=True):
        row.beat()
        acme, bits = asyncio.run(worker.describe())
        assert (acme["in_flight"], acme["prompt_tokens"], acme["output_tokens"]) == (6, 60, 600)
        assert (bits["in_flight"], bits["prompt_tokens"], bits["output_tokens"]) == (0, 0, 0)
    for left in (3, 0):
        account_of(workers[1], bearer(b"k-2")).in_flight = left
        assert not list(workers[1].share())
        rows[0].beat()
        assert asyncio.run(workers[0].describe())[1]["in_flight"] == left
    rows[2].close()  # a worker that has ended has nothing in flight
    rows[0].beat()
    assert asyncio.run(workers[0].describe())[0]["in_flight"] == 3
    rows[0].close()
    rows[1].close()


async def test_thousands_are_shared_and_described_over_several_turns() -> None:
    count = 3 * ACCOUNTS_A_TURN
    found = tenants(*(tenant(f"tenant-{i}", b"k-%d" % i) for i in range(count)))
    assert len(list(found.share())) == 3
    described, turns = asyncio.create_task(found.describe()), 0
    while not described.done():
        await asyncio.sleep(0)
        turns += 1
    assert len(described.result()) == count and turns > 3


def test_salts_differ_by_tenant_and_outlast_a_key() -> None:
    found = tenants(tenant("acme", b"k-1"), tenant("bits", b"k-2"))
    acme, bits = account_of(found, bearer(b"k-1")), account_of(found, bearer(b"k-2"))
    assert acme.salt != bits.salt
    assert len(msgspec.json.decode(acme.salt, type=str)) == 32
    assert account_of(tenants(tenant("acme", b"k-9")), bearer(b"k-9")).salt == acme.salt
    assert found.salt("acme") == acme.salt
    found.read(parse({**GOOD, "tenants": [tenant("bits", b"k-2")]}))
    assert found.salt("acme") == acme.salt
    assert tenants().salt("") == b""


def test_usage_is_counted_for_its_tenant() -> None:
    found = tenants(tenant("acme", b"k-1"), tenant("bits", b"k-2"))
    found.served("acme", TokenUsage(prompt=5, completion=2))
    found.served("gone", TokenUsage(prompt=9, completion=9))
    counts = {
        entry["name"]: (entry["prompt_tokens"], entry["output_tokens"])
        for entry in asyncio.run(found.describe())
    }
    assert counts == {"acme": (5, 2), "bits": (0, 0)}
