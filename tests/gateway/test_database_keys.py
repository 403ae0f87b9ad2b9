"""Tenants and keys of the database, through two workers and an accounting process."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.worker import ROOT, Stack, model, until

pytestmark = pytest.mark.process


class Deployment(Stack):
    """Two workers with an accounting process."""

    async def start_accounting(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway.accounting.main", "--state", str(self.root), cwd=ROOT,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self.workers.append(process)
        await until(lambda: self.changes("GET", "/admin/keys"), "the accounting process answers")
        return process

    async def changes(self, method: str, path: str, body: Any = None) -> bool:
        return (await self.admin.request(method, path, json=body)).status_code == 200

    async def change(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.admin.request(method, path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def statuses(self, key: str) -> set[int]:
        """What some new connections are answered, which both workers accept."""
        headers = {"x-api-key": key, "connection": "close"}
        answers = await asyncio.gather(*(self.http.get("/v1/models", headers=headers) for _ in range(12)))
        return {answer.status_code for answer in answers}

    async def is_answered(self, key: str, status: int) -> None:
        async def answered() -> bool:
            return await self.statuses(key) == {status}

        await until(answered, f"all workers answer {status}")


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Deployment]:
    made = Deployment(tmp_path)
    yield made
    await made.close()


async def test_keys_of_the_database_from_creation_to_kills(stack: Deployment) -> None:
    stack.models = [model("alpha"), model("beta")]
    await stack.start_controller()
    for number in range(2):
        await stack.start_worker(number)
    await stack.is_answered("", 200)
    refused = await stack.admin.post("/admin/tenants", json={"name": "web"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "accounting_unreachable")
    accounting = await stack.start_accounting()

    await stack.change("POST", "/admin/tenants", {"name": "web", "models": ["alpha"]})
    await stack.is_answered("", 401)
    kept, revoked = [(await stack.change("POST", "/admin/keys", {"tenant": "web"})) for _ in range(2)]
    for made in (kept, revoked):
        assert await stack.statuses(made["key"]) == {200}, "in force once it is answered"
    headers = {"authorization": f"Bearer {kept['key']}"}
    listed = (await stack.http.get("/v1/models", headers=headers)).json()["data"]
    assert [card["id"] for card in listed] == ["alpha"]
    body = {"model": "beta", "messages": [{"role": "user", "content": "x"}]}
    hidden, unknown = [
        await stack.http.post("/v1/chat/completions", json={**body, "model": name}, headers=headers)
        for name in ("beta", "gamm")
    ]
    assert (hidden.status_code, hidden.text.replace("beta", "gamm")) == (404, unknown.text)

    await roles_are_held(stack, kept["key"])

    await stack.change("DELETE", f"/admin/keys/{revoked['view']['id']}")
    assert await stack.statuses(revoked["key"]) == {401}
    assert await stack.statuses(kept["key"]) == {200}

    for process in (accounting, *stack.workers):
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
            await process.wait()
    await stack.start_worker(0)
    await stack.is_answered(kept["key"], 200)
    await stack.is_answered(revoked["key"], 401)
    shown = (await stack.admin.get("/admin/tenants")).json()
    assert [entry["name"] for entry in shown["tenants"]] == [] and "problem" in shown


async def _may(client: httpx.AsyncClient, expected: list[bool]) -> bool:
    asked = (("GET", "/admin/keys"), ("POST", "/admin/scale"), ("PATCH", "/admin/tenants/web"))
    statuses = [(await client.request(*each, json={})).status_code for each in asked]
    return 401 not in statuses and [status != 403 for status in statuses] == expected


async def roles_are_held(stack: Deployment, tenant_key: str) -> None:
    """Admin keys may do what their role allows, tenants' keys nothing."""
    made = {
        role: (await stack.change("POST", "/admin/admin-keys", {"name": role, "role": role}))["key"]
        for role in ("viewer", "operator", "admin")
    }
    expected = {
        "viewer": [True, False, False], "operator": [True, True, False], "admin": [True, True, True],
    }  # fmt: skip
    for role, key in made.items():
        async with httpx.AsyncClient(
            base_url=stack.admin_url, headers={"authorization": f"Bearer {key}"}, trust_env=False
        ) as client:
            await until(partial(_may, client, expected[role]), f"{role}: {expected[role]}")
    for path in ("/admin/keys", "//admin/keys", "/admin/fleet", "/admin/audit"):
        answer = await stack.http.get(path, headers={"authorization": f"Bearer {tenant_key}"})
        assert answer.status_code == 404, "the client port has no such path"
        answer = await stack.admin.get(path, headers={"authorization": f"Bearer {tenant_key}"})
        assert answer.status_code == 401
    actors = {entry["actor"] for entry in await stack.change("GET", "/admin/audit?action=tenant.update")}
    assert actors == {"admin key admin"}
