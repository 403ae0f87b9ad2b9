"""Tenants and keys over the accounting process's API, on SQLite and PostgreSQL."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from gateway.accounting import database_access
from gateway.accounting.access_snapshot_writer import AccessSnapshotWriter
from gateway.accounting.access_transaction import PreparedSnapshot
from gateway.accounting.budgets import Budgets
from policy.errors import Unreachable
from policy.wire.access_snapshot import AdminKeyRow, KeyRow, SnapshotHead, TenantRow
from store.key_derivation import digest_of
from store.tenancy import keys as key_rows
from tests.clock import Clock
from tests.gateway.accounting.site import DECLARED, DOCUMENT, AccountingSite

HOSTILE = ("'; DROP TABLE api_keys; --", 'x" OR "1"="1', "%", "_", "\\", "日本 ✓")


@pytest.fixture
def clock() -> Clock:
    return Clock(1_000_000.0)


@pytest.fixture
def host(tmp_path: Path, database_url: str, clock: Clock) -> Iterator[Callable[[str], AccountingSite]]:
    made: list[AccountingSite] = []

    def make(name: str = "a") -> AccountingSite:
        made.append(AccountingSite(tmp_path / name, database_url, clock))
        return made[-1]

    yield make
    for each in made:
        each.database.close()


@pytest.fixture
def site(host: Callable[[str], AccountingSite]) -> AccountingSite:
    return host("a")


async def web(site: AccountingSite, **more: Any) -> Any:
    await site.ask("POST", "/tenants", {"name": "web", **more})
    return await site.ask("POST", "/keys", {"tenant": "web", "alias": "ci"})


async def test_a_key_is_shown_once_and_stored_as_its_digest(site: AccountingSite) -> None:
    made = await web(site)
    key, view = made["key"], made["view"]
    assert key.startswith("tg-") and (view["state"], view["alias"]) == ("valid", "ci")
    rest = [await site.ask("GET", path) for path in ("/keys", f"/keys/{view['id']}", "/audit", "/tenants")]
    for hidden in (key, digest_of(key.encode())):
        assert hidden not in str(rest)
    with site.access.reading() as connection:
        row = connection.execute(text("SELECT * FROM api_keys")).one()
    assert key not in str(row) and digest_of(key.encode()) in row
    assert stat.S_IMODE(site.state.access_path.stat().st_mode) == 0o600


async def test_tenants_and_keys_from_creation_to_removal(site: AccountingSite, clock: Clock) -> None:
    await site.ask("POST", "/tenants", {"name": "web", "rpm_limit": 5, "models": ["m"], "weight": 2})
    first = (await site.ask("POST", "/keys", {"tenant": "web", "duration": "2h"}))["view"]
    second = (await site.ask("POST", "/keys", {"tenant": "web", "max_tokens": 9}))["view"]
    declared_key = (await site.ask("POST", "/keys", {"tenant": "declared", "expires": 1_000_005.0}))["view"]
    tenants = {each["name"]: each for each in await site.ask("GET", "/tenants")}
    assert [(name, each["declared"], each["keys"]) for name, each in tenants.items()] == [
        ("declared", True, 2), ("web", False, 2),
    ]  # fmt: skip
    changed = await site.ask("PATCH", "/tenants/web", {"rpm_limit": None, "tpm_limit": 50})
    assert (changed["rpm_limit"], changed["tpm_limit"], changed["models"]) == (None, 50, ["m"])

    rotated = await site.ask("POST", f"/keys/{second['id']}/rotate", {"grace_s": 60})
    assert rotated["view"]["max_tokens"] == 9 and rotated["view"]["id"] != second["id"]
    clock.now += 61
    states = {each["id"]: each["state"] for each in await site.ask("GET", "/keys?all=true")}
    assert states.pop(f"declared-{DECLARED[:12]}") == "valid"
    assert states == {
        first["id"]: "valid", rotated["view"]["id"]: "valid",
        second["id"]: "expired", declared_key["id"]: "expired",
    }  # fmt: skip
    await site.ask("DELETE", f"/keys/{first['id']}")
    await site.ask("PATCH", "/tenants/web", {"blocked": True})
    (left,) = await site.ask("GET", "/keys?tenant=web")
    assert (left["id"], left["state"]) == (rotated["view"]["id"], "blocked")
    await site.ask("DELETE", "/tenants/web")
    assert await site.ask("GET", "/keys?tenant=web") == []
    head, *rows = site.file()
    assert isinstance(head, SnapshotHead) and rows == []


async def test_the_file_of_the_workers_follows_changes_of_other_hosts(
    host: Callable[[str], AccountingSite], clock: Clock
) -> None:
    here, there = host("a"), host("b")
    made = await web(here, metadata={"team": "x"})
    admin = await here.ask("POST", "/admin-keys", {"name": "bot", "role": "viewer"})
    there.snapshot.update()
    assert there.file() == here.file()
    _, tenant, key, of_admin = there.file()
    assert isinstance(tenant, TenantRow) and tenant.tenant.metadata == {}, "workers need none"
    assert isinstance(key, KeyRow) and key.sha256 == digest_of(made["key"].encode())
    assert isinstance(of_admin, AdminKeyRow) and of_admin.sha256 == digest_of(admin["key"].encode())
    await there.ask("DELETE", f"/keys/{key.id}")
    written = here.state.access_path.stat().st_ino
    here.snapshot.update()
    assert [type(row) for row in here.file()] == [SnapshotHead, TenantRow, AdminKeyRow]
    rewritten = here.state.access_path.stat().st_ino
    here.snapshot.update()
    assert written != rewritten == here.state.access_path.stat().st_ino, "written at a change alone"


async def test_a_clock_that_was_set_back_brings_back_the_keys_that_had_ended_by_it(
    site: AccountingSite, clock: Clock
) -> None:
    await site.ask("POST", "/tenants", {"name": "web"})
    kept = {"tenant": "web", "duration": "90d", "max_budget": 1.0}
    made = await site.ask("POST", "/keys", kept)
    await site.ask("POST", "/admin-keys", {"name": "bot", "role": "viewer", "duration": "90d"})
    clock.now += 365 * 86_400
    ahead = AccessSnapshotWriter(site.access, site.state)
    budgets = Budgets(site.access)
    for reader in (ahead, budgets):
        reader.update()
    assert [type(row) for row in site.file()] == [SnapshotHead, TenantRow] and not budgets.every()
    clock.now -= 365 * 86_400
    for reader in (ahead, budgets):
        reader.update()
    assert [type(row) for row in site.file()] == [SnapshotHead, TenantRow, KeyRow, AdminKeyRow]
    assert [budget.name for budget in budgets.every()] == [made["view"]["id"]]


@pytest.mark.parametrize(
    ("ask", "body", "status", "said"),
    [
        ("POST /tenants", {"name": "declared"}, 409, "the deployment file declares"),
        ("POST /tenants", {"name": "web"}, 409, "already"),
        ("POST /tenants", {"name": "a b"}, 400, "name: got 'a b', expected a name that matches"),
        ("POST /tenants", {"name": "x", "models": ["o"]}, 400, "models[0]: got 'o', expected one of"),
        ("POST /tenants", {"name": "x", "rpm_limit": 0}, 400, "rpm_limit: got 0, expected int >= 1"),
        ("POST /tenants", {"name": "x", "rpm": 1}, 400, "rpm: got 1, expected one of the keys"),
        ("POST /tenants", {"name": "x", "keys_sha256": ["cd" * 32]}, 400, "made apart"),
        ("POST /tenants", {"name": "x", "dry_run": ["rpm_limit"]}, 400, "a limit that is set"),
        ("POST /tenants", {"name": "x", "budget_duration": "7d"}, 400, "nothing without max_budget"),
        ("POST /tenants", {"name": "x", "metadata": {"a": "b" * 16_384}}, 400, "bytes of JSON"),
        ("POST /tenants", [], 400, "$: got [], expected object"),
        ("PATCH /tenants/declared", {"weight": 2}, 409, "change it in the deployment file"),
        ("PATCH /tenants/nobody", {}, 404, "there is no tenant 'nobody'"),
        ("PATCH /tenants/web", {"name": "y"}, 400, "name: got 'y'"),
        ("PATCH /tenants/web", {"max_budget": 1, "budget_duration": "7 days"}, 400, "such as 1mo"),
        ("DELETE /tenants/declared", None, 409, "change it in the deployment file"),
        ("GET /tenants/nobody", None, 404, "there is no tenant"),
        ("POST /keys", {"tenant": "nobody"}, 404, "there is no tenant 'nobody'"),
        ("POST /keys", {"tenant": "web", "expires": 999_999}, 400, "Unix seconds in the future"),
        ("POST /keys", {"tenant": "web", "duration": "1y"}, 400, "such as 90s"),
        ("POST /keys", {"tenant": "web", "alias": "a\nb"}, 400, "printable"),
        ("GET /keys/key-1", None, 404, "there is no key"),
        (f"DELETE /keys/declared-{DECLARED[:12]}", None, 409, "change it in the deployment file"),
        ("POST /keys/key-1/rotate", {"grace_s": -1}, 400, "grace_s: got -1"),
        ("POST /admin-keys", {"name": "x", "role": "root"}, 400, "viewer, operator, admin"),
        ("DELETE /admin-keys/x", None, 404, "there is no admin key"),
        ("GET /audit?last=0", None, 400, "last: got 0"),
    ],
)
async def test_what_is_refused_says_why_and_changes_nothing(
    site: AccountingSite, ask: str, body: Any, status: int, said: str
) -> None:
    await web(site)
    before = site.file()
    refused = await site.ask(*ask.split(" ", 1), body, status=status)
    assert said in refused["error"]["message"]
    assert site.file() == before


async def test_keys_of_a_tenant_that_left_the_file_belong_to_no_later_one(site: AccountingSite) -> None:
    made = await site.ask("POST", "/keys", {"tenant": "declared", "alias": "ci"})
    path = f"/keys/{made['view']['id']}"
    site.declare(tenants=[])
    assert (await site.ask("GET", path))["state"] == "blocked"
    assert (await site.ask("POST", "/tenants", {"name": "declared"}))["keys"] == 0
    assert (await site.ask("GET", path))["state"] == "revoked"
    assert [type(row) for row in site.file()] == [SnapshotHead, TenantRow]
    created, revoked = await site.ask("GET", "/audit?last=2")
    assert (created["action"], revoked["action"]) == ("tenant.create", "key.revoke")
    assert (revoked["target"], revoked["before"]) == (
        made["view"]["id"],
        {"tenant": "declared", "alias": "ci"},
    )


async def test_expired_keys_of_a_deleted_tenant_stay_refused_when_the_clock_is_set_back(
    site: AccountingSite, clock: Clock
) -> None:
    await site.ask("POST", "/tenants", {"name": "web"})
    made = await site.ask("POST", "/keys", {"tenant": "web", "duration": "90d"})
    clock.now += 365 * 86_400
    await site.ask("DELETE", "/tenants/web")
    await site.ask("POST", "/tenants", {"name": "web"})
    clock.now -= 365 * 86_400
    assert (await site.ask("GET", f"/keys/{made['view']['id']}"))["state"] == "revoked"
    actions = [each["action"] for each in await site.ask("GET", "/audit?action=key.")]
    assert actions == ["key.revoke", "key.create"], "once"


async def test_keys_of_a_tenant_that_left_the_file_can_be_deleted(site: AccountingSite) -> None:
    made = await site.ask("POST", "/keys", {"tenant": "declared"})
    site.declare(tenants=[])
    deleted = await site.ask("DELETE", "/tenants/declared")
    assert (deleted["name"], deleted["declared"], deleted["keys"]) == ("declared", False, 1)
    assert "created" not in deleted or deleted["created"] is None
    await site.ask("DELETE", "/tenants/declared", status=404)
    site.declare()
    assert (await site.ask("GET", f"/keys/{made['view']['id']}"))["state"] == "revoked"
    (revoked,) = await site.ask("GET", "/audit?last=1")
    assert (revoked["action"], revoked["target"]) == ("key.revoke", made["view"]["id"])


async def test_a_tenant_is_blocked_and_limited_after_a_model_that_it_names_is_gone(
    site: AccountingSite,
) -> None:
    await site.ask("POST", "/tenants", {"name": "web", "models": ["m"]})
    site.declare(models=DOCUMENT["models"][1:])
    changed = await site.ask("PATCH", "/tenants/web", {"blocked": True, "rpm_limit": 1})
    assert (changed["blocked"], changed["rpm_limit"], changed["models"]) == (True, 1, ["m"])
    refused = await site.ask("PATCH", "/tenants/web", {"models": ["m"]}, status=400)
    assert "models[0]: got 'm', expected one of" in refused["error"]["message"]
    assert (await site.ask("PATCH", "/tenants/web", {"models": ["n"]}))["models"] == ["n"]


async def test_a_key_that_has_ended_is_not_changed_again(site: AccountingSite) -> None:
    made = await web(site)
    path = f"/keys/{made['view']['id']}"
    await site.ask("DELETE", path)
    for method, at in (("DELETE", path), ("POST", f"{path}/rotate")):
        assert "revoked already" in (await site.ask(method, at, status=409))["error"]["message"]


@pytest.mark.parametrize("text_", HOSTILE)
async def test_sql_in_names_and_aliases_is_text(site: AccountingSite, text_: str) -> None:
    made = await web(site)
    kept = await site.ask("POST", "/keys", {"tenant": "web", "alias": text_, "metadata": {text_: text_}})
    shown = await site.ask("GET", f"/keys/{kept['view']['id']}")
    assert (shown["alias"], shown["metadata"]) == (text_, {text_: text_})
    quoted = text_.encode().hex("%", 1)
    for path in (f"/keys/%{quoted}", f"/tenants/%{quoted}"):
        await site.ask("DELETE", path, status=404)
    await site.ask("POST", "/tenants", {"name": text_}, status=400)
    assert await site.ask("GET", f"/keys?tenant=%{quoted}") == []
    assert await site.ask("GET", f"/audit?action=%{quoted}") == []
    assert len(await site.ask("GET", "/keys?tenant=web")) == 2
    assert (await site.ask("GET", f"/keys/{made['view']['id']}"))["state"] == "valid"


async def test_the_number_of_keys_is_bounded(site: AccountingSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.accounting.key_changes.MAX_KEYS", 1)
    made = await web(site)
    refused = await site.ask("POST", "/keys", {"tenant": "web"}, status=409)
    assert "the most that workers keep" in refused["error"]["message"]
    await site.ask("DELETE", f"/keys/{made['view']['id']}")
    await site.ask("POST", "/keys", {"tenant": "web"})


async def test_the_audit_trail_has_each_change_and_cannot_be_changed(site: AccountingSite) -> None:
    made = await web(site, rpm_limit=5)
    await site.ask("PATCH", "/tenants/web", {"rpm_limit": 6})
    await site.ask("POST", f"/keys/{made['view']['id']}/rotate")
    await site.ask("POST", "/keys", {"tenant": "nobody"}, status=404)
    entries = await site.ask("GET", "/audit")
    assert [(each["actor"], each["role"], each["action"]) for each in entries] == [
        ("alice", "admin", action)
        for action in ("key.rotate", "tenant.update", "key.create", "tenant.create")
    ]
    update = entries[1]
    assert (update["target"], update["before"]["rpm_limit"], update["after"]["rpm_limit"]) == ("web", 5, 6)
    found = await site.ask("GET", "/audit?last=1&action=tenant.&actor=alice&before_number=2")
    assert [each["number"] for each in found] == [1]
    for statement in ("UPDATE audit SET actor = 'bob'", "DELETE FROM audit"):
        with pytest.raises(Unreachable, match="append-only"), site.database.get().writing() as connection:
            connection.execute(text(statement))
    assert await site.ask("GET", "/audit") == entries


@pytest.mark.process
async def test_the_same_on_postgresql(tmp_path: Path, postgresql_url: str, clock: Clock) -> None:
    site = AccountingSite(tmp_path, postgresql_url, clock)
    made = await web(site, rpm_limit=5)
    assert [type(row) for row in site.file()] == [SnapshotHead, TenantRow, KeyRow]
    await site.ask("DELETE", f"/keys/{made['view']['id']}")
    assert (await site.ask("GET", "/audit?last=1"))[0]["action"] == "key.revoke"
    for statement in ("UPDATE audit SET actor = 'bob'", "TRUNCATE audit"):
        with pytest.raises(Unreachable, match="append-only"), site.database.get().writing() as connection:
            connection.execute(text(statement))
    site.database.close()


async def test_a_locked_database_refuses_changes_clearly(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_access, "BUSY_S", 0.05)
    site = AccountingSite(tmp_path, f"sqlite:///{tmp_path}/t.db", clock)
    await web(site)
    before = site.file()
    other = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    refused = await site.ask("POST", "/keys", {"tenant": "web"}, status=503)
    assert "the database does not answer: database is locked" in refused["error"]["message"]
    assert len(await site.ask("GET", "/keys?tenant=web")) == 1, "reading goes on"
    assert site.file() == before
    other.execute("COMMIT")
    other.close()
    await site.ask("POST", "/keys", {"tenant": "web"})
    site.database.close()


def test_ids_are_public_and_do_not_repeat() -> None:
    assert len({key_rows.new_id("key") for _ in range(1000)}) == 1000


async def test_without_room_for_the_file_of_the_workers_nothing_is_changed(site: AccountingSite) -> None:
    made = await web(site)
    away = site.state.root.rename(site.state.root.with_name("away"))
    path = f"/keys/{made['view']['id']}"
    for method, at, body in (
        ("DELETE", path, None),
        ("POST", "/keys", {"tenant": "web"}),
        ("PATCH", "/tenants/web", {"blocked": True}),
    ):
        refused = await site.ask(method, at, body, status=503)
        assert "the workers' file of keys cannot be written" in refused["error"]["message"]
    away.rename(site.state.root)
    assert [each["state"] for each in await site.ask("GET", "/keys?tenant=web&all=true")] == ["valid"]
    assert [each["action"] for each in await site.ask("GET", "/audit")] == ["key.create", "tenant.create"]
    await site.ask("DELETE", path)
    assert [type(row) for row in site.file()] == [SnapshotHead, TenantRow]


async def test_a_committed_change_is_answered_as_one(
    site: AccountingSite, caplog: pytest.LogCaptureFixture
) -> None:
    await web(site)
    site.state.access_path.unlink()
    site.state.access_path.mkdir()
    made = await site.ask("POST", "/keys", {"tenant": "web"})
    assert made["key"] and "not in force on this host yet" in caplog.text
    site.state.access_path.rmdir()
    site.snapshot.update()
    assert [type(row) for row in site.file()] == [SnapshotHead, TenantRow, KeyRow, KeyRow]
    assert not [path for path in site.state.root.iterdir() if path.name.startswith(".access")]


async def test_the_file_of_an_earlier_change_replaces_no_later_one(site: AccountingSite) -> None:
    slow: list[PreparedSnapshot] = []
    prepare = site.access.prepare

    def pause(connection: Connection) -> PreparedSnapshot:
        slow.append(prepare(connection))
        return PreparedSnapshot()

    site.access.prepare = pause
    await site.ask("POST", "/tenants", {"name": "web"})
    site.access.prepare = prepare
    await site.ask("POST", "/keys", {"tenant": "web"})
    slow[0].put_in_force()
    slow[0].discard()
    assert [type(row) for row in site.file()] == [SnapshotHead, TenantRow, KeyRow]
