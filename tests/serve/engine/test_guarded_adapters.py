"""The guard and adapters: a request waits for the version that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from policy.errors import EngineFailed
from policy.types import ReplicaPhase
from policy.wire.headers import ADAPTER_HEADER, PREFILL_HEADER, SECRET_HEADER
from serve.engine.interface import Receive, Scope, Send
from serve.engine.request_guard import RequestGuard
from tests.serve.engine.fakes import Replica, Request, digest, quiet, replica, served
from tests.serve.sim_driver import until


def post(guard: RequestGuard, adapter: str | None, body: tuple[bytes, ...] = (b"{}",)) -> Request:
    headers = {SECRET_HEADER: "s", PREFILL_HEADER: "100"}
    if adapter is not None:
        headers[ADAPTER_HEADER] = adapter
    return Request(guard, "POST", "/v1/completions", headers, body)


class App:
    """An app that answers with what it was sent, once ``go`` is set; ``seen`` is what was loaded then."""

    def __init__(self, there: Replica) -> None:
        self.go = asyncio.Event()
        self.go.set()
        self.seen: list[tuple[str, ...]] = []
        self._there = there

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, message = b"", await receive()
        while message["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
            message = await receive()
        self.seen.append(self._there.engine.adapters())
        await self.go.wait()
        self.seen.append(self._there.engine.adapters())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def named(letter: str) -> str:
    return f"{letter}@{digest(letter)}"


Guarded = tuple[Replica, RequestGuard, App]


@asynccontextmanager
async def guarded(slots: int) -> AsyncIterator[Guarded]:
    async with replica(slots) as there:
        app: Any = App(there)
        there.engine.app = app  # type: ignore[method-assign]
        guard = RequestGuard(there.engine, there.adapters, secret="s", bound=8, clock=there.clock)
        guard.become(ReplicaPhase.READY)
        yield there, guard, app


async def test_the_app_receives_the_whole_request_after_the_load() -> None:
    async with guarded(1) as (there, guard, app):
        there.engine.gate.clear()
        request = post(guard, named("a"), (b"one ", b"two ", b"three"))
        await until(lambda: bool(there.engine.log))
        await quiet()
        line = guard.line()
        assert (line.load.in_flight, line.adapters, app.seen) == (1, (), [])
        there.engine.gate.set()
        await request.task
        assert app.seen == [(served("a"),)] * 2
        assert request.sent[1]["body"] == b"one two three"
        line = guard.line()
        assert (line.load.in_flight, line.adapters) == (0, (served("a"),))
        # The adapter is loaded for the second request.
        again = post(guard, named("a"), (b"one ", b"more"))
        await again.task
        assert again.sent[1]["body"] == b"one more"
        assert there.engine.log == ["+a"]


async def test_an_adapter_stays_loaded_until_its_requests_end() -> None:
    async with guarded(1) as (_there, guard, app):
        app.go.clear()
        first = post(guard, named("a"))
        await until(lambda: len(app.seen) == 1)
        second = post(guard, named("b"))
        await quiet()
        assert guard.line().adapters == (served("a"),)
        app.go.set()
        await asyncio.gather(first.task, second.task)
        assert app.seen == [(served("a"),)] * 2 + [(served("b"),)] * 2


async def test_a_request_without_the_header_loads_nothing() -> None:
    async with guarded(1) as (there, guard, app):
        request = post(guard, None)
        await request.task
        assert (request.sent[0]["status"], there.engine.log, app.seen) == (200, [], [(), ()])


@pytest.mark.parametrize(
    "header",
    [
        "", "a", "@", f"a@{'a' * 12}", f"a@{'a' * 63}", f"a@{'a' * 65}", f"a@{'A' * 64}", f"a@{'g' * 64}",
        f"@{'a' * 64}", f"../a@{'a' * 64}", f"a b@{'a' * 64}", f"{'a' * 65}@{'a' * 64}", f"a@{'a' * 64}\n",
        f" a@{'a' * 64}", f"a@a@{'a' * 64}", f"\xe9@{'a' * 64}", f".a@{'a' * 64}",
    ],
)  # fmt: skip
async def test_an_invalid_adapter_header_is_refused(header: str) -> None:
    async with guarded(1) as (there, guard, app):
        request = post(guard, header)
        await request.task
        status, code, _ = request.refusal
        assert (status, code) == (400, "bad_request")
        assert (app.seen, there.files.fetched) == ([], [])
        assert guard.line().load.in_flight == 0


async def test_a_failed_load_is_a_503_and_is_in_the_load_line() -> None:
    async with guarded(1) as (there, guard, app):
        there.engine.refuses = {served("a")}
        requests = [post(guard, named("a")) for _ in range(3)]
        await asyncio.gather(*(request.task for request in requests))
        late = post(guard, named("a"))
        await late.task
        for request in [*requests, late]:
            assert request.refusal == (503, "adapter_failed", "engine_refused: the rank is wrong")
        line = guard.line()
        assert (line.refused, line.adapters, line.load.in_flight) == ((served("a"),), (), 0)
        assert (there.engine.log, app.seen) == (["+a"], [])
        assert msgspec.json.decode(msgspec.json.encode(line))["refused"] == [served("a")]


async def test_loads_and_failures_send_load_lines() -> None:
    async with guarded(1) as (there, guard, _):
        lines = guard.lines()
        assert (await anext(lines)).adapters == ()
        await there.used("a")
        assert (await anext(lines)).adapters == (served("a"),)
        there.files.missing = {"b"}
        await post(guard, named("b")).task
        assert (await anext(lines)).refused == (served("b"),)


@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_a_disconnect_during_the_load_frees_everything(how: str) -> None:
    async with guarded(1) as (there, guard, _app):
        there.engine.gate.clear()
        leaves, stays = post(guard, named("a")), post(guard, named("a"))
        await until(lambda: bool(there.engine.log))
        await quiet()
        leaves.leave() if how == "leave" else leaves.task.cancel()
        await asyncio.wait([leaves.task])
        if how == "leave":
            assert leaves.sent == []
        else:  # as `cut` does: it has not begun, so the gateway sends it elsewhere
            assert leaves.refusal[:2] == (503, "draining")
        assert (guard.line().load.in_flight, guard.line().load.pending_tokens) == (1, 100)
        there.engine.gate.set()
        await stays.task
        assert stays.sent[0]["status"] == 200
        await there.used("b")
        assert there.engine.log == ["+a", "-a", "+b"]


async def test_a_prefill_is_pending_while_its_adapter_loads() -> None:
    async with guarded(1) as (there, guard, app):
        there.engine.gate.clear()
        app.go.clear()
        prefilling = there.engine.stats
        request = post(guard, named("a"))
        await until(lambda: bool(there.engine.log))
        there.clock.now += 60.0
        assert prefilling().prefilling == 0
        assert guard.line().load.pending_tokens == 100
        there.engine.gate.set()
        await until(lambda: bool(app.seen))
        assert guard.line().load.pending_tokens == 100
        # Computed by now, as far as the engine knows.
        there.clock.now += 60.0
        assert guard.line().load.pending_tokens == 0
        app.go.set()
        await request.task


async def test_an_engine_failure_during_a_load_is_replica_lost() -> None:
    with pytest.raises(EngineFailed):
        async with guarded(1) as (there, guard, app):
            there.engine.broken = EngineFailed("the core is gone")
            request = post(guard, named("a"))
            await request.task
            assert request.refusal[:2] == (503, "replica_lost")
            assert app.seen == []
