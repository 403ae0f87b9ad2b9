"""Changes over the controller's API are in the audit trail, with who made them, what was, and what became."""

from __future__ import annotations

import asyncio

import pytest

from policy.wire.accounting_api import AdminRole, AuditActor, AuditEntry, AuditQuery, actor_headers
from serve import change_audit
from store.database import Database
from store.tenancy import audit, audit_spool
from tests.gateway.worker import until
from tests.serve.plane import Plane
from tests.serve.sim_documents import document, sim_model

ALICE = actor_headers(AuditActor("admin key älice", AdminRole.OPERATOR))


def spooled(plane: Plane) -> list[AuditEntry]:
    found: list[AuditEntry] = []
    audit_spool.drain(plane.state, found.extend)
    return found


async def test_overrides_and_adapters_are_recorded_with_their_actor(plane: Plane) -> None:
    await plane.ready(document(sim_model("m", adapters={})))
    running = asyncio.create_task(plane.controller.adapters.run())
    await plane.controller.adapters.library.line()
    async with plane.client() as client:
        for path, body in (
            ("/scale", {"model": "m", "replicas": 2}),
            ("/mode", {"model": "m", "mode": "single-large"}),
            ("/adapters", {"name": "sql", "source": "https://user:KEY@h/a.zip"}),
        ):
            assert (await client.post(path, json=body, headers=ALICE)).status_code == 200
        assert (await client.post("/adapters/m/sql/split", json={"v1": 1}, headers=ALICE)).status_code == 200
        assert (await client.delete("/adapters/m/sql")).status_code == 200
        assert (await client.post("/scale", json={"model": "m", "replicas": 99})).status_code == 409
    running.cancel()
    entries = spooled(plane)
    assert [(each.action, each.target) for each in entries] == [
        ("scale", "m"), ("mode", "m"),
        ("adapter.add", "m:sql"), ("adapter.split", "m:sql"), ("adapter.remove", "m:sql"),
    ]  # fmt: skip
    assert {(each.actor, each.role) for each in entries[:4]} == {("admin key älice", "operator")}
    assert entries[4].actor == "the internal secret"
    scale, mode, added = entries[:3]
    assert scale.before["set_replicas"] is None and scale.after["set_replicas"]["count"] == 2
    assert (mode.before["mode"], mode.after["mode"]) == ("multi-replica", "single-large")
    assert "KEY" not in str(added.after) and added.after["source"].endswith("h/a.zip")
    assert spooled(plane) == []


async def test_a_controller_without_an_accounting_process_adds_its_entries_itself(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_audit, "_DRAIN_EVERY_S", 0.01)
    await plane.ready(document(sim_model("m")))
    await plane.controller.audit.record(ALICE, "scale", "m", after={"replicas": 2})
    with plane.state.audit_spool_path.open("ab") as file:
        file.write(b'{"at": 1.0, "actor')  # cut by a crash
    running = asyncio.create_task(plane.controller.audit.run())
    await until(lambda: not plane.state.audit_spool_path.exists())
    running.cancel()
    database = Database(plane.state.database_url(""))
    with database.reading() as connection:
        (entry,) = audit.read(connection, AuditQuery())
    database.close()
    assert (entry.number, entry.action, entry.after) == (1, "scale", {"replicas": 2})
