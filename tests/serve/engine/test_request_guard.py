"""The request guard: what it admits, counts and refuses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from policy.engine.performance_model import Timing
from policy.routing.engine_prefix_index import KvBlockIndex, NamedPrompt
from policy.types import ReplicaPhase
from policy.wire import headers
from policy.wire.load_stream import PROFILE
from serve.engine import request_guard, response_guard
from serve.engine.adapters.loader import AdapterLoader
from serve.engine.interface import ALLOWED, NAMED, EngineStats, Receive, Scope, Send
from serve.engine.request_guard import MAX_PREFIXES, RequestGuard
from tests.clock import Clock
from tests.serve.engine.fakes import TIMING, FakeEngine, FakeFiles, Request

SECRET = {headers.SECRET_HEADER: "s"}
CHAT = "/v1/chat/completions"
# A burst ends within this time on any machine.
WAIT_S = 0.5


class Held(FakeEngine):
    """An engine whose answers wait for ``go``; ``reached`` lists what came through the guard."""

    def __init__(self, slots: int = 0) -> None:
        super().__init__(slots, Clock())
        self.go = asyncio.Event()
        self.reached: list[str] = []
        self.fail = False
        self.status = 200
        self.prefilling = 10_000

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append(f"{scope['method']} {scope['path']}")
        await receive()
        if scope["method"] == "POST":
            going = asyncio.ensure_future(self.go.wait())
            left = asyncio.ensure_future(receive())
            await asyncio.wait({going, left}, return_when=asyncio.FIRST_COMPLETED)
            going.cancel()
            left.cancel()
        if self.fail:
            raise RuntimeError("the app is wrong")
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def stats(self) -> EngineStats:
        return EngineStats(running=1, waiting=2, kv_used=0.5, tokens=7, prefilling=self.prefilling)

    def adapters(self) -> tuple[str, ...]:
        return ("sql",)


def guarded(engine: Held, bound: int = 2, clock: Callable[[], float] = lambda: 42.0) -> RequestGuard:
    return RequestGuard(engine, AdapterLoader(engine, FakeFiles()), secret="s", bound=bound, clock=clock)


@pytest.fixture
def engine() -> Held:
    return Held()


@pytest.fixture
def guard(engine: Held) -> RequestGuard:
    made = guarded(engine)
    made.become(ReplicaPhase.READY)
    return made


@pytest.fixture
async def client(guard: RequestGuard) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(guard)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://r", headers=SECRET) as made:
        yield made


async def in_flight(guard: RequestGuard, count: int) -> None:
    while guard.line().load.in_flight != count:  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0)


def refusal(answer: httpx.Response) -> str:
    body = answer.json()["error"]
    assert body.keys() == {"message", "type", "param", "code"}
    assert body["code"] == answer.headers[headers.REFUSAL_HEADER]
    return str(body["code"])


@pytest.mark.parametrize(
    "given", [{}, {headers.SECRET_HEADER: ""}, {headers.SECRET_HEADER: "S"}, {headers.SECRET_HEADER: "ss"}]
)
async def test_a_secret_is_required(engine: Held, client: httpx.AsyncClient, given: dict[str, str]) -> None:
    client.headers.pop(headers.SECRET_HEADER)
    inside = {("GET", "/internal/load"), ("GET", "/nowhere")}
    for method, path in {*ALLOWED, *inside}:
        answer = await client.request(method, path, headers=given)
        assert answer.status_code == 401
        assert refusal(answer) == "unauthorized"
    assert engine.reached == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/collective_rpc"),
        ("POST", "/sleep"),
        ("GET", "/health"),
        ("GET", CHAT),
        ("DELETE", "/v1/models"),
        ("POST", f"{CHAT}/"),
        ("POST", f"/x/..{CHAT}"),
        ("POST", "/internal/load"),
    ],
)
async def test_unlisted_paths_reach_no_engine(
    engine: Held, guard: RequestGuard, method: str, path: str
) -> None:
    request = Request(guard, method, path, SECRET)
    await request.task
    assert request.refusal[:2] == (404, "not_found")
    assert engine.reached == []


async def test_listed_paths_reach_the_engine(engine: Held, client: httpx.AsyncClient) -> None:
    engine.go.set()
    for method, path in ALLOWED:
        assert (await client.request(method, path)).status_code == 200
    assert sorted(engine.reached) == sorted(f"{method} {path}" for method, path in ALLOWED)


async def test_requests_over_bound_are_refused(
    engine: Held, guard: RequestGuard, client: httpx.AsyncClient
) -> None:
    held = [Request(guard, "POST", CHAT, SECRET) for _ in range(2)]
    await in_flight(guard, 2)
    answer = await client.post(CHAT)
    assert (answer.status_code, refusal(answer)) == (503, "busy")
    # A GET is not counted, so a full replica still answers it.
    assert (await client.get("/v1/models")).status_code == 200
    engine.go.set()
    await asyncio.gather(*(request.task for request in held))
    assert guard.line().load.in_flight == 0
    assert (await client.post(CHAT)).status_code == 200


async def test_draining_finishes_old_requests(
    engine: Held, guard: RequestGuard, client: httpx.AsyncClient
) -> None:
    held = Request(guard, "POST", CHAT, SECRET)
    await in_flight(guard, 1)
    guard.become(ReplicaPhase.DRAINING)
    assert (guard.line().state, guard.line().load.in_flight) == (ReplicaPhase.DRAINING, 1)
    answer = await client.post(CHAT)
    assert (answer.status_code, refusal(answer)) == (503, "draining")
    assert not held.task.done()
    engine.go.set()
    await held.task
    assert held.sent[0]["status"] == 200
    assert guard.line().load.in_flight == 0
    guard.become(ReplicaPhase.READY)
    assert guard.state is ReplicaPhase.DRAINING


async def test_a_request_given_back_is_refused_unless_its_answer_has_begun(guard: RequestGuard) -> None:
    """The gateway sends what was refused to another replica, at no charge and without a suspicion."""
    waiting = Request(guard, "POST", CHAT, SECRET)
    await in_flight(guard, 1)
    guard.give_back()
    with pytest.raises(asyncio.CancelledError):
        await waiting.task
    assert waiting.refusal[:2] == (503, "draining")
    assert (guard.state, guard.line().load.in_flight) == (ReplicaPhase.DRAINING, 0)


async def test_an_answer_that_has_begun_ends_when_it_is_given_back(engine: Held, guard: RequestGuard) -> None:
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
        begun.set()
        await asyncio.Event().wait()

    engine.app = app  # type: ignore[method-assign]
    stream = Request(guard, "POST", CHAT, SECRET)
    await begun.wait()
    guard.give_back()
    with pytest.raises(asyncio.CancelledError):
        await stream.task
    assert [message.get("status") for message in stream.sent] == [200, None]


@pytest.mark.parametrize("status", [200, 500])
async def test_an_engine_failure_ends_open_requests_with_503(
    engine: Held, guard: RequestGuard, client: httpx.AsyncClient, status: int
) -> None:
    engine.status = status
    held = Request(guard, "POST", CHAT, SECRET)
    await in_flight(guard, 1)
    engine.dead = True
    engine.go.set()
    await held.task
    assert (held.refusal[:2], len(held.sent)) == ((503, "replica_lost"), 2)
    # A later request did not begin, and may be retried elsewhere.
    late = await client.post(CHAT)
    assert (late.status_code, refusal(late)) == (503, "starting")
    assert guard.state is ReplicaPhase.STARTING


async def test_only_the_canary_is_served_while_starting(engine: Held, client: httpx.AsyncClient) -> None:
    guard = guarded(engine)
    engine.go.set()
    refused = Request(guard, "POST", CHAT, SECRET)
    await refused.task
    assert refused.refusal[:2] == (503, "starting")
    canary = Request(guard, "POST", CHAT, {**SECRET, headers.CANARY_HEADER: "1"})
    await canary.task
    assert canary.sent[0]["status"] == 200


async def test_an_exception_decrements_the_in_flight_count(engine: Held, guard: RequestGuard) -> None:
    engine.fail = True
    engine.go.set()
    request = Request(guard, "POST", CHAT, SECRET)
    with pytest.raises(RuntimeError, match="the app is wrong"):
        await request.task
    assert guard.line().load.in_flight == 0


@pytest.mark.parametrize("how", ["leave", "cancel"])
async def test_a_disconnect_decrements_the_in_flight_count(guard: RequestGuard, how: str) -> None:
    requests = [Request(guard, "POST", CHAT, SECRET) for _ in range(2)]
    await in_flight(guard, 2)
    for request in requests:
        request.leave() if how == "leave" else request.task.cancel()
    await asyncio.gather(*(request.task for request in requests), return_exceptions=True)
    assert guard.line().load.in_flight == 0


async def test_a_load_line_has_the_counts_of_engine_and_guard(guard: RequestGuard) -> None:
    request = Request(guard, "POST", CHAT, SECRET)
    await in_flight(guard, 1)
    line = guard.line()
    assert (line.state, line.adapters, line.load.at) == (ReplicaPhase.READY, ("sql",), 42.0)
    load = line.load
    assert (load.in_flight, load.bound, load.running, load.waiting) == (1, 2, 1, 2)
    assert (load.kv_used, load.tokens) == (0.5, 7)
    request.task.cancel()


def loads(request: Request) -> list[dict[str, Any]]:
    bodies = [message["body"] for message in request.sent if message["type"] == "http.response.body"]
    return [msgspec.json.decode(body) for body in bodies]


@pytest.mark.slow
async def test_a_burst_is_one_load_line(
    engine: Held, guard: RequestGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_guard, "HEARTBEAT_S", 3600.0)
    monkeypatch.setattr(request_guard, "COALESCE_S", WAIT_S)
    stream = Request(guard, "GET", "/internal/load", SECRET)
    while not loads(stream):  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0)
    assert loads(stream)[0]["load"]["in_flight"] == 0
    # Both start and end within the wait after the first line: one line has all four changes.
    engine.go.set()
    await asyncio.gather(*(Request(guard, "POST", CHAT, SECRET).task for _ in range(2)))
    guard.become(ReplicaPhase.DRAINING)
    while len(loads(stream)) < 2:  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0.001)
    await asyncio.sleep(1.2 * WAIT_S)
    assert [line["state"] for line in loads(stream)] == ["ready", "draining"]
    stream.leave()
    guard.become(ReplicaPhase.STOPPED)
    await stream.task


def announcing(tokens: str, prefix: str = "") -> dict[str, str]:
    return {**SECRET, headers.PREFILL_HEADER: tokens, headers.PREFIX_HEADER: prefix}


async def test_announced_prefills_are_pending_until_the_first_byte(engine: Held, guard: RequestGuard) -> None:
    held = [Request(guard, "POST", CHAT, announcing(tokens)) for tokens in ("100", "30")]
    await in_flight(guard, 2)
    assert guard.line().load.pending_tokens == 130
    held[0].leave()
    await held[0].task
    assert guard.line().load.pending_tokens == 30
    engine.go.set()
    await held[1].task
    assert guard.line().load.pending_tokens == 0


async def test_the_first_byte_of_a_stream_ends_its_pending_prefill(guard: RequestGuard, engine: Held) -> None:
    more = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await engine.go.wait()
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await more.wait()
        await send({"type": "http.response.body", "body": b""})

    engine.app = app  # type: ignore[method-assign]
    request = Request(guard, "POST", CHAT, announcing("100"))
    await in_flight(guard, 1)
    assert guard.line().load.pending_tokens == 100
    lines = guard.lines()
    await anext(lines)
    engine.go.set()
    load = (await anext(lines)).load
    assert (load.in_flight, load.pending_tokens) == (1, 0)
    more.set()
    await request.task


@pytest.mark.parametrize("asked", [True, False])
async def test_an_answer_has_the_engines_times_if_they_are_asked_for(engine: Held, asked: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kind = (b"content-type", b"text/event-stream")
        await send({"type": "http.response.start", "status": 200, "headers": [kind]})
        await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await asyncio.sleep(0.02)
        await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    engine.app = app  # type: ignore[method-assign]
    guard = guarded(engine)
    guard.become(ReplicaPhase.READY)
    given = SECRET | ({headers.ENGINE_TIME_HEADER: "1"} if asked else {})
    transport = httpx.ASGITransport(guard)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://r", headers=given) as client:
        answer = await client.post(CHAT)
    events, _, comment = answer.content.partition(b"\n: ")
    assert events.strip() == b"data: 1\n\ndata: 2"
    assert (headers.ENGINE_TIME_HEADER in answer.headers) is asked
    if asked:
        assert float(answer.headers[headers.ENGINE_TIME_HEADER]) >= 0.009
        name, seconds = comment.split()
        assert (name.decode(), float(seconds) >= 0.019) == (headers.ENGINE_TIME_HEADER, True)


async def test_a_trace_is_sent_as_a_file_and_removed(
    engine: Held, client: httpx.AsyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for query in ("?seconds=0", "?seconds=x", "?seconds=1e9"):
        assert (await client.post(f"{PROFILE}{query}")).status_code == 400
    refused = await client.post(f"{PROFILE}?seconds=1")
    assert (refused.status_code, refused.json()["error"]["message"]) == (409, "it has no profiler")
    file = tmp_path / "trace.json.gz"

    async def profile(seconds: float) -> Path:
        file.write_bytes(b"x" * 5 + f"{seconds}".encode())
        return file

    monkeypatch.setattr(engine, "profile", profile)
    monkeypatch.setattr(response_guard, "PART", 4)
    assert (await client.post(f"{PROFILE}?seconds=1.5")).content == b"xxxxx1.5"
    assert not file.exists()


async def test_computed_prompts_are_not_pending_before_the_first_byte(engine: Held) -> None:
    now = 0.0
    guard = guarded(engine, bound=4, clock=lambda: now)
    guard.become(ReplicaPhase.READY)
    engine.prefilling = 0
    old = Request(guard, "POST", CHAT, announcing("100"))
    await in_flight(guard, 1)
    # It may not have reached the engine yet.
    assert guard.line().load.pending_tokens == 100
    now = 1.0
    assert guard.line().load.pending_tokens == 0
    new = Request(guard, "POST", CHAT, announcing("30"))
    await in_flight(guard, 2)
    assert guard.line().load.pending_tokens == 30
    engine.go.set()
    await asyncio.gather(old.task, new.task)


@pytest.mark.parametrize("tokens", ["", "-5", "1e3", "9" * 5000, "\xb2"])
async def test_an_invalid_announcement_is_ignored(engine: Held, guard: RequestGuard, tokens: str) -> None:
    engine.go.set()
    request = Request(guard, "POST", CHAT, announcing(tokens, "zz,1"))
    await in_flight(guard, 1)
    assert guard.line().load.pending_tokens == 0
    await request.task
    assert request.sent[0]["status"] == 200


async def test_a_load_stream_sends_timing_once_and_the_latest_prefixes(
    engine: Held, guard: RequestGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_guard, "HEARTBEAT_S", 3600.0)
    engine.go.set()
    first, late = f"{(1 << 64) - 1:x},a", ",".join(f"{i:x}" for i in range(MAX_PREFIXES + 1))
    await Request(guard, "POST", CHAT, announcing("5", first)).task
    streams = [Request(guard, "GET", "/internal/load", SECRET) for _ in range(2)]
    while not all(loads(stream) for stream in streams):  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0)
    for stream in streams:
        line = loads(stream)[0]
        assert msgspec.convert(line["timing"], Timing) == TIMING
        assert line["prefixes"] == [(1 << 64) - 1, 10]
    await Request(guard, "POST", CHAT, announcing("5", late)).task
    while not all(len(loads(stream)) == 2 for stream in streams):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for stream in streams:
        line = loads(stream)[1]
        assert "timing" not in line
        assert line["prefixes"] == list(range(1, MAX_PREFIXES + 1))
        stream.task.cancel()


@pytest.mark.parametrize(
    ("new", "depths", "named"),
    [
        ("4,6", "2,10,20,30,45", NamedPrompt((2, 4, 6), (10, 20, 30), 45)),
        ("4,6", "0,0,20,30,45", NamedPrompt((4, 6), (20, 30), 45)),
        ("4,6,7", "2,10,20,30,45", NamedPrompt((2, 4, 6), (10, 20, 30), 45)),
        ("", "2,10,45", NamedPrompt((2,), (10,), 45)),
        ("4", "", None),
        ("4", "0,0,45", None),
        ("4", "0,x,20,45", None),
    ],
)
async def test_the_engine_learns_how_the_gateway_names_a_prompt(
    new: str, depths: str, named: NamedPrompt | None
) -> None:
    seen: list[NamedPrompt | None] = []

    class Naming(Held):
        async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(NAMED.get())
            await super().app(scope, receive, send)

    naming = Naming()
    naming.blocks = KvBlockIndex(16)
    naming.go.set()
    made = guarded(naming)
    made.become(ReplicaPhase.READY)
    given = SECRET | {headers.PREFIX_HEADER: new, headers.DEPTHS_HEADER: depths}
    transport = httpx.ASGITransport(made)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://r", headers=given) as client:
        assert (await client.post(CHAT)).status_code == 200
    assert seen == [named]
