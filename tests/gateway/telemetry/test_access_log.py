"""The access log: a line for each request that ended, with names and numbers alone."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.control.deployment_file_watcher import DeploymentWatcher
from gateway.intake.shared_limits import SharedLimits
from gateway.intake.usage_journal import UsageJournal
from gateway.protocol.errors import Refused
from gateway.protocol.paths import ROUTES
from gateway.request_pipeline import Gateway
from gateway.routing.shared_counters import LOCAL
from gateway.telemetry import access_log
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.structured_log import StructuredLog
from gateway.telemetry.traces.exporter import TraceExporter
from policy.errors import Refusal
from store.state_dir import StateDir
from tests.gateway.fake_replica import Exchange
from tests.gateway.worker import Stack, until
from tests.policy.example_documents import GOOD

PROMPT = "canary-word"


def lines(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("access-*.log"))
    return [json.loads(line) for path in files for line in path.read_bytes().splitlines()]


HEADERS = [(b"x-request-id", b"mine"), (b"authorization", b"Bearer tg-key")]
TENANTS = [{"name": "acme", "keys_sha256": [hashlib.sha256(b"tg-key").hexdigest()]}]


def logging_gateway(state: StateDir, stream: io.StringIO, traces: TraceExporter | None = None) -> Gateway:
    state.save(state.deployment_path, {**GOOD, "tenants": TENANTS, "gateway": {"access_log": True}})
    log, access = StructuredLog(0, stream), AccessLog(state.logs / "access-0.log", 0, list[int]().append)
    watcher = DeploymentWatcher(state, log)
    gateway = Gateway(
        watcher, "secret", b"s" * 32, admin_token=state.admin_token, log=log, access=access,
        traces=traces or TraceExporter(0, random.SystemRandom(), lambda count, cause: None),
        rng=random.SystemRandom(),
        shared=LOCAL, captures=state.captures,
        accounting=state.accounting_socket_path, journal=UsageJournal(state.usage_path, log),
            limits=SharedLimits(state.limits_path),
    )  # fmt: skip
    gateway.read(watcher.deployment)
    return gateway


async def test_an_internal_error_is_logged_with_its_request_and_places(tmp_path: Path) -> None:
    state, stream = StateDir(tmp_path), io.StringIO()
    gateway = logging_gateway(state, stream)
    sent: list[Any] = []

    async def receive() -> Any:
        raise ValueError(PROMPT)

    async def send(message: Any) -> None:
        sent.append(message)

    await gateway.serve(ROUTES["/v1/completions"], {"headers": HEADERS}, receive, send)
    assert sent[0]["status"] == 500
    logged = json.loads(stream.getvalue())
    assert (logged["event"], logged["level"], logged["error"]) == ("call_failed", "error", "ValueError")
    assert (logged["request_id"], logged["route"]) == ("mine", "/v1/completions")
    assert [place.split()[-1] for place in logged["traceback"]] == ["serve", "read", "receive"]
    gateway.end_captures()
    await gateway.close()
    (line,) = lines(state.logs)
    assert (line["request_id"], line["status"], line["outcome"]) == ("mine", 500, "internal")
    for text in (stream.getvalue(), json.dumps(line)):
        assert PROMPT not in text and "tg-key" not in text and str(tmp_path) not in text


async def test_a_request_that_is_refused_before_it_is_read_is_its_tenants(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    gateway = logging_gateway(state, io.StringIO())
    scope = {"path": "/v1/completions", "method": "POST", "headers": HEADERS}
    assert gateway.body_limit(scope)
    gateway.count_refused(Refused(Refusal.TOO_LARGE, "It is too large."), scope, b"mine")
    gateway.count_refused(Refused(Refusal.HEAD_TOO_LARGE, "Its head is too large."), None, b"other")
    assert gateway.tenants.of(dict(HEADERS)).account.counters.requests == {"too_large": 1}
    gateway.end_captures()
    await gateway.close()
    large, unknown = lines(state.logs)
    assert large.items() >= {"request_id": "mine", "tenant": "acme", "status": 413}.items()
    assert unknown.items() >= {"request_id": "other", "tenant": None, "outcome": "head_too_large"}.items()


async def test_lines_that_are_being_written_at_the_end_are_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "WRITE_EVERY_S", 0.0)
    loop, slow = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    loop.run_in_executor(None, slow.wait)
    access = AccessLog(tmp_path / "access-0.log", 0, list[int]().append)
    writing = asyncio.create_task(access.run())
    refuse(access)
    for _ in range(9):
        await asyncio.sleep(0)
    writing.cancel()
    refuse(access)
    closing = asyncio.create_task(access.close())
    await asyncio.gather(writing, return_exceptions=True)
    slow.set()
    await closing
    assert len(lines(tmp_path)) == 2


def refuse(access: AccessLog) -> None:
    access.unread(b"id", client=None, tenant="", status=400, outcome="bad_request")


async def test_a_disk_that_takes_no_lines_loses_them_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "WRITE_EVERY_S", 0.0)
    monkeypatch.setattr(access_log, "MOST_WAITING", 3)
    folder, lost = tmp_path / "logs", list[int]()
    folder.write_text("no directory")
    access = AccessLog(folder / "access-0.log", 0, lost.append)
    writing = asyncio.create_task(access.run())
    for _ in range(5):
        refuse(access)
    await until(lambda: sum(lost) == 5, "all are lost")
    folder.unlink()
    refuse(access)
    await until(lambda: bool(lines(folder)), "the next is written")
    writing.cancel()
    await access.close()
    assert (len(lines(folder)), sum(lost)) == (1, 5)


@pytest.mark.process
async def test_requests_of_a_worker_are_logged_when_the_deployment_says_so(stack: Stack) -> None:
    folder = stack.root / "logs"
    await stack.start_controller()
    await stack.start_worker()
    replica = await stack.serve("r")
    await stack.chat()
    stack.gateway["access_log"] = True
    stack.write_document()
    await until(lambda: stack_logs(stack, folder), "the deployment is read")

    async def fail(exchange: Exchange) -> None:
        await exchange.reply(json.dumps({"error": {"message": PROMPT}}).encode(), status=400)

    await stack.chat(messages=[{"role": "user", "content": PROMPT}])
    replica.answer = fail
    await stack.chat(messages=[{"role": "user", "content": PROMPT}])
    await stack.http.post("/v1/chat/completions", json={"model": PROMPT})
    await stack.http.get(f"/v1/models/{PROMPT}?{PROMPT}", headers={"x-api-key": PROMPT})
    await stack.http.get(f"/{PROMPT}")
    await stack.http.get("/v1/models", headers={"x-big": "x" * 40_000})
    stack.workers[0].terminate()
    await stack.workers[0].wait()
    *_, served, refused, unknown, card, nowhere, unread = lines(folder)
    chat = {"route": "/v1/chat/completions", "worker": 0, "level": "info", "event": "request"}
    assert (
        served.items() >= {**chat, "status": 200, "outcome": "ok", "model": "alpha", "replica": "r"}.items()
    )
    assert served["prompt_tokens"] and served["output_tokens"] and served["duration_s"] > 0
    assert refused.items() >= {**chat, "status": 400, "outcome": "bad_request", "tenant": None}.items()
    assert unknown.items() >= {**chat, "status": 404, "model": None, "replica": None}.items()
    assert card.items() >= {"method": "GET", "route": "/v1/models/{name:path}", "status": 404}.items()
    assert nowhere.items() >= {"method": "GET", "route": None, "status": 404}.items()
    assert unread.items() >= {"status": 431, "outcome": "head_too_large"}.items()
    assert PROMPT not in json.dumps(lines(folder))


async def stack_logs(stack: Stack, folder: Path) -> bool:
    await stack.http.get("/v1/models")
    return bool(lines(folder))
