"""Marked prompts, answers, keys and names take every path: no log, file, metric, trace or table has one."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.fake_replica import ANSWER, Exchange, event, forever
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.test_access import bearer, tenant
from tests.gateway.worker import ROOT, Stack, until
from tests.otlp_receiver import receiving

pytestmark = pytest.mark.process

KEY = "tg-canary-key-of-the-file"
PROMPT, SPOKEN, WRONG_KEY, UNKNOWN = (
    "canary-prompt",
    "canary-answer",
    "canary-wrong-key",
    "canary-unknown-name",
)
CHAT = {"model": "alpha", "messages": [{"role": "user", "content": PROMPT}], "user": f"{PROMPT}-user"}
# A request that says it everywhere.
FULL = {
    **CHAT,
    "messages": [{"role": "system", "content": PROMPT}, *CHAT["messages"]],
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": PROMPT, "parameters": {"title": PROMPT}},
        }
    ],
    "stop": [PROMPT],
    "metadata": {"a": PROMPT},
    PROMPT: PROMPT,
}
SECRETS = {"secret", "admin-token"}


async def replies(exchange: Exchange) -> None:
    """An answer that repeats the request, and fails as it is told to."""
    text = exchange.body.decode()
    if "fail-500" in text:
        error = {
            "message": f"{PROMPT} {SPOKEN} in /srv/{PROMPT}.py",
            "type": PROMPT,
            "param": PROMPT,
            "code": PROMPT,
        }
        await exchange.reply(json.dumps({"error": error}).encode(), status=500)
    elif "fail-400" in text:
        await exchange.reply(json.dumps({"error": {"message": PROMPT, "code": 400}}).encode(), status=400)
    elif "fail-nonsense" in text:
        await exchange.reply(f"{{{PROMPT} {SPOKEN}".encode())
    elif "fail-close" in text:
        await exchange.head("text/event-stream")
        await exchange.chunk(event(SPOKEN))
        exchange.close()
    elif "fail-event" in text:
        await exchange.head("text/event-stream")
        await exchange.chunk(event(SPOKEN) + f"data: {{{PROMPT}\n\n".encode())
        await exchange.end()
    elif exchange.json.get("stream"):
        await exchange.head("text/event-stream")
        await exchange.chunk(event(SPOKEN) + event(finish="stop") + b"data: [DONE]\n\n")
        await exchange.end()
    else:
        await exchange.reply(ANSWER.replace("Paris é".encode(), SPOKEN.encode()))


async def no_controller(exchange: Exchange) -> None:
    await exchange.reply(b"{}", status=404)


async def every_path(stack: Stack, keys: list[str]) -> None:
    """Requests that are served, refused, broken, aborted; by valid and other keys."""
    post, chat = stack.http.post, "/v1/chat/completions"
    for key in keys:
        for body in (CHAT, FULL, {**CHAT, "stream": True}, {**CHAT, "model": f"alpha:{UNKNOWN}"}):
            await post(chat, json=body, headers=bearer(key))
        for fault in ("500", "400", "nonsense", "close", "event"):
            for streamed in (False, True):
                said = [{"role": "user", "content": f"{PROMPT} fail-{fault}"}]
                await post(chat, json={**CHAT, "messages": said, "stream": streamed}, headers=bearer(key))
    own = bearer(keys[0], **{"x-forwarded-for": "203.0.113.9", "x-forwarded-host": "a", "forwarded": "for=1"})
    for body in (
        f'{{"model": "alpha", "messages": "{PROMPT}',
        f"{PROMPT}",
        f'{{"model": "{UNKNOWN}", "prompt": "{PROMPT}"}}',
        f'{{"model": "alpha", "messages": [], "temperature": "{PROMPT}", "n": "{PROMPT}"}}',
        json.dumps({**CHAT, "max_tokens": PROMPT}),
    ):
        await post(chat, content=body, headers=own)
    for path in ("/v1/completions", "/v1/messages", "/v1/responses"):
        fields = {"prompt": PROMPT, "input": PROMPT, "messages": CHAT["messages"], "max_tokens": 9}
        await post(path, json={"model": "alpha", **fields}, headers=own)
    await post("/v1/embeddings", json={"model": "vectors", "input": [PROMPT]}, headers=own)
    for wrong in (bearer(WRONG_KEY), {"x-api-key": WRONG_KEY}, {"authorization": f"Basic {WRONG_KEY}"}, {}):
        await post(chat, json=CHAT, headers=wrong)
        await stack.admin.get("/admin/fleet", headers={"authorization": "", **wrong})
    await stack.http.get(f"/{PROMPT}/{WRONG_KEY}?key={WRONG_KEY}", headers=own)
    await stack.http.get(f"/v1/models/{UNKNOWN}", headers=own)
    for raw in (
        f"GET /{PROMPT} HTTP/1.1\r\n{PROMPT}\r\n\r\n",
        f"{PROMPT}\r\n\r\n",
        f"POST {chat} HTTP/9\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.client_socket.getsockname()[1])
        writer.write(raw.encode())
        await reader.read()
        writer.close()


async def aborted(stack: Stack, key: str) -> None:
    """A stream whose client leaves after its first event."""
    stack.replicas[0].answer = forever
    body = {**CHAT, "stream": True}
    async with stack.http.stream("POST", "/v1/chat/completions", json=body, headers=bearer(key)) as answer:
        async for _ in answer.aiter_lines():
            break
    await until(lambda: stack.replicas[0].in_flight == 0, "it is aborted")
    stack.replicas[0].answer = replies


async def administered(stack: Stack) -> str:
    """A key of the database that changes were made to."""
    admin = stack.admin

    async def is_ready() -> bool:
        return (await admin.get("/admin/audit")).status_code == 200

    await until(is_ready, "the accounting process answers")
    assert (await admin.post("/admin/tenants", json={"name": "stored"})).status_code in (200, 201)
    made = (await admin.post("/admin/keys", json={"tenant": "stored"})).json()
    rotated = (await admin.post(f"/admin/keys/{made['view']['id']}/rotate", json={"grace_s": 60})).json()
    await admin.post("/admin/admin-keys", json={"name": "viewer", "role": "viewer"})
    await admin.post("/admin/tenants", json={"name": f"bad {UNKNOWN}", "metadata": PROMPT})
    await admin.post("/admin/playground", json={**CHAT, "stream": False})

    async def known() -> bool:
        return (await stack.http.get("/v1/models", headers=bearer(rotated["key"]))).status_code == 200

    await until(known, "the key is in force")
    return str(rotated["key"])


def tables(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        names = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        return "\n".join(str(row) for name in names for row in connection.execute(f"SELECT * FROM '{name}'"))  # noqa: S608


async def test_no_prompt_answer_or_key_is_kept_or_shown(stack: Stack) -> None:
    upstream = FakeUpstream()
    upstream.answer = replies
    await upstream.start()
    stack.servers.append(upstream)
    stack.tenants = [tenant("web", KEY, admin=True)]
    stack.upstreams = [
        {"name": "theirs", "url": f"{upstream.url}/v1", "models": {"alpha": "a"}, "cost_cap_per_h": 9,
         "price": {"input": 1, "output": 1}},
    ]  # fmt: skip
    stack.gateway |= {
        "access_log": True,
        "queue_timeout_s": 2,
        "eject": {"failures": 10_000, "success_rate": 0},
    }
    logs = stack.root / "logs"
    logs.mkdir(exist_ok=True)
    with (
        receiving() as receiver,
        (logs / "gateway-0.log").open("wb") as log,
        (logs / "a.log").open("wb") as other,
    ):
        stack.tracing = {"endpoint": receiver.url, "sample_ratio": 1.0}
        await stack.start_controller()
        await stack.spawn_worker(0, log)
        accounting = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway.accounting.main",
            "--state",
            str(stack.root),
            cwd=ROOT,
            stderr=other,
        )
        try:
            shown = await _use(stack)
        finally:
            accounting.terminate()
            await accounting.wait()
        for worker in stack.workers:
            worker.terminate()
            await worker.wait()
        await until(lambda: len(receiver.spans) > 20, "traces are exported")
        seen = {"traces": b"".join(receiver.bodies).decode(errors="replace"), **shown}
    keys = seen.pop("valid keys").split()
    assert len(keys) == 2
    seen["tables"] = tables(stack.root / "tidegate.db")
    files = [path for path in stack.root.rglob("*") if path.is_file() and path.name not in SECRETS]
    seen |= {str(path.relative_to(stack.root)): path.read_bytes().decode(errors="replace") for path in files}
    assert {
        "logs/gateway-0.log",
        "logs/access-0.log",
        "tidegate.db",
        "metrics scrape",
        "capture",
    } <= seen.keys()
    assert "fail" in seen["logs/access-0.log"] or "bad_request" in seen["logs/access-0.log"]
    assert "stored" in seen["tables"]
    assert all("event" in json.loads(line) for line in seen["logs/gateway-0.log"].splitlines())
    forbidden = [PROMPT, SPOKEN, WRONG_KEY, UNKNOWN, "Traceback", *keys]
    found = [(name, text) for name, content in seen.items() for text in forbidden if text in content]
    assert found == []


async def _use(stack: Stack) -> dict[str, str]:
    """Take every path; returns what the admin port shows afterwards, and the keys."""
    replica = await stack.serve("one", bound=50)
    replica.answer = replies
    stack.controller.answer = no_controller
    key = await administered(stack)
    captured: list[str] = []

    async def capture() -> None:
        async with stack.admin.stream("GET", "/admin/capture") as answer:
            async for line in answer.aiter_lines():
                captured.append(line)

    capturing = asyncio.create_task(capture())
    await until(lambda: bool(captured), "the capture has begun")
    await every_path(stack, [KEY, key])
    assert not any("forwarded" in name for hit in replica.hits for name in hit.headers)
    await aborted(stack, KEY)
    stack.replicas[0].answer = replies
    await until(lambda: len(captured) > 10, "requests are captured")
    capturing.cancel()
    await asyncio.gather(capturing, return_exceptions=True)
    await asyncio.sleep(1.5)  # what is written twice a second
    shown = {"valid keys": f"{KEY} {key}", "capture": "\n".join(captured)}
    shown["metrics scrape"] = (await stack.admin.get("/metrics")).text
    for path in (
        "fleet",
        "routes",
        "tenants",
        "keys",
        "admin-keys",
        "audit",
        "usage",
        "adapters",
        "limits",
        "live",
    ):
        answer: httpx.Response = await stack.admin.get(f"/admin/{path}")
        shown[path] = answer.text
    reports: list[dict[str, Any]] = stack.controller.reports
    return {**shown, "reports": json.dumps(reports)}
