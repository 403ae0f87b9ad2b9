"""Tenants and keys of the database reach a worker by a file, beside those of the deployment file."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.intake import access_feed
from gateway.intake.access_feed import AccessFeed
from gateway.intake.admin_keys import AdminKeys
from gateway.intake.authentication import TenantDirectory
from gateway.intake.principal import Principal
from gateway.protocol.errors import Refused
from gateway.routing.shared_counters import LOCAL
from gateway.telemetry.metrics import WorkerMetrics
from gateway.telemetry.structured_log import StructuredLog
from policy.config.tenancy import AccessPolicy, Tenant
from policy.deployment_file.parse import parse
from policy.wire.access_snapshot import AdminKeyRow, KeyRow, SnapshotHead, SnapshotLine, TenantRow
from policy.wire.accounting_api import AdminRole, AuditActor
from store.key_derivation import digest_of
from store.state_dir import write_atomic
from tests.clock import Clock
from tests.gateway.worker import until
from tests.policy.example_documents import GOOD


def key(tenant: str, name: str, **more: Any) -> KeyRow:
    return KeyRow(id=f"key-{name}", sha256=digest_of(name.encode()), tenant=tenant, **more)


def tenant(name: str, *, blocked: bool = False, **more: Any) -> TenantRow:
    return TenantRow(tenant=Tenant(name=name, **more), blocked=blocked)


def declared(*names: str) -> Any:
    tenants = [{"name": name, "keys_sha256": [digest_of(name.encode())], "rpm_limit": 7} for name in names]
    return parse({**GOOD, "tenants": tenants})


class Worker:
    """One worker's tenants, and the file that it follows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock(1000.0)
        self.log = io.StringIO()
        self.admin_keys = AdminKeys(self.clock)
        self.tenants = TenantDirectory(b"s" * 64, "own", WorkerMetrics().tenants, LOCAL, self.clock)
        self.in_force: list[int] = []
        self.feed = AccessFeed(
            path, self.tenants, self.admin_keys, StructuredLog(0, self.log), self.in_force.append
        )
        self.tenants.read(declared())

    def write(self, *rows: TenantRow | KeyRow | AdminKeyRow) -> None:
        counts = [sum(isinstance(row, kind) for row in rows) for kind in (TenantRow, KeyRow, AdminKeyRow)]
        head = SnapshotHead(revision=len(rows), tenants=counts[0], keys=counts[1], admin_keys=counts[2])
        lines: list[SnapshotLine] = [head, *rows]
        write_atomic(self.path, msgspec.json.Encoder().encode_lines(lines), mode=0o600)

    def of(self, name: str) -> Principal:
        return self.tenants.of({b"x-api-key": name.encode()})

    def admits(self, name: str) -> bool:
        with contextlib.suppress(Refused):
            return bool(self.of(name).key_id)
        return False


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path / "access.ndjson")


@pytest.fixture
async def following(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Worker]:
    monkeypatch.setattr(access_feed, "LOOK_EVERY_S", 0.001)
    task = asyncio.create_task(worker.feed.run())
    yield worker
    task.cancel()


async def admitted(worker: Worker, name: str) -> None:
    await until(lambda: worker.admits(name), f"{name} is admitted")


async def refused(worker: Worker, name: str) -> None:
    await until(lambda: not worker.admits(name), f"{name} is refused")


def test_a_worker_starts_with_the_last_file(worker: Worker) -> None:
    worker.feed.start_from_disk()
    assert worker.of("anything") is worker.tenants.anonymous, "without a file"
    worker.write(tenant("web", max_tokens=9, weight=3.0), key("web", "k", access=AccessPolicy(max_tokens=5)))
    worker.feed.start_from_disk()
    assert worker.in_force == [2]
    principal = worker.of("k")
    assert (principal.account.name, principal.account.weight, principal.key_id) == ("web", 3.0, "key-k")
    assert (principal.max_tokens, [each.max_tokens for each in principal.access]) == (5, [9, 5])
    assert worker.of("own") is worker.tenants.anonymous
    assert not worker.admits("other") and not worker.admits("")


def test_keys_that_replaced_each_other_have_their_limits_together(worker: Worker) -> None:
    access = AccessPolicy(rpm_limit=1)
    worker.write(
        tenant("web"),
        key("web", "old", access=access),
        key("web", "new", access=access, first_id="key-old"),
        key("web", "other", access=access),
    )
    worker.feed.start_from_disk()
    limited = {name: worker.of(name).limited[0] for name in ("old", "new", "other")}
    assert limited["old"].key == limited["new"].key != limited["other"].key
    assert limited["new"].name == "key-new", "what a refusal says"


def test_a_key_ends_at_its_date_by_the_wall_clock(worker: Worker) -> None:
    worker.write(tenant("web"), key("web", "k", expires=1010.0))
    worker.feed.start_from_disk()
    assert worker.admits("k")
    worker.clock.now = 1010.0
    with pytest.raises(Refused, match="has expired") as caught:
        worker.of("k")
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    worker.clock.now = 500.0  # the clock was set back
    assert worker.admits("k")


def test_blocked_and_unknown_tenants_have_no_valid_keys(worker: Worker) -> None:
    worker.write(tenant("web", blocked=True), key("web", "k"), key("gone", "l"))
    worker.feed.start_from_disk()
    assert not worker.admits("k") and not worker.admits("l")
    assert not worker.admits(""), "there is a tenant: keys are required"


async def test_changes_of_the_file_and_of_the_deployment_are_in_force(following: Worker) -> None:
    following.write(tenant("web"), key("web", "k"), key("acme", "a"))
    await admitted(following, "k")
    account = following.of("k").account
    account.prompt_tokens = 5
    following.tenants.read(declared("acme", "web"))
    await admitted(following, "a")
    assert following.of("a").access[0].rpm_limit == 7
    assert following.of("web").account is account, "the declared tenant counts, with the counts that it had"
    following.write(tenant("web"), key("acme", "a"))
    await refused(following, "k")
    following.tenants.read(declared())
    await refused(following, "a")
    assert [each["name"] for each in await following.tenants.describe()] == ["web"]


@pytest.mark.parametrize("broken", [b"", b"{", b'{"type":"tenant"}\n', None])
async def test_a_broken_file_leaves_the_last_keys_in_force(following: Worker, broken: bytes | None) -> None:
    following.write(tenant("web"), key("web", "k"))
    await admitted(following, "k")
    whole = following.path.read_bytes()
    write_atomic(following.path, whole[: whole.index(b"\n") + 1] if broken is None else broken)
    await until(lambda: "access_file_refused" in following.log.getvalue())
    assert following.admits("k")
    following.path.unlink()
    assert following.admits("k")


@pytest.mark.slow
def test_twenty_thousand_keys_are_read_in_pieces(worker: Worker) -> None:
    rows = [key("web", f"k{i}") for i in range(20_000)]
    worker.write(tenant("web"), *rows)
    pieces = list(worker.feed._pieces(worker.path.read_bytes()))
    assert len(pieces) > 50, "each is one turn of the event loop"
    assert worker.admits("k19999")


def test_admin_keys_have_a_role_until_they_expire(worker: Worker) -> None:
    row = AdminKeyRow(
        id="admin-1", sha256=digest_of(b"tga-1"), name="bot", role=AdminRole.OPERATOR, expires=1010.0
    )
    worker.write(row)
    worker.feed.start_from_disk()
    assert worker.admin_keys.actor(b"tga-1") == AuditActor("admin key bot", AdminRole.OPERATOR)
    assert worker.admin_keys.actor(b"tga-2") is None
    worker.clock.now = 1010.0
    assert worker.admin_keys.actor(b"tga-1") is None
    assert worker.of("tga-1") is worker.tenants.anonymous, "an admin key is no tenant's"
