"""Bodies of clients and answers of replicas that are made to be dear: none may stall the other requests."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import NamedTuple

import httpx
import pytest
import pytest_asyncio

from gateway.protocol.body import MAX_DECODED
from gateway.protocol.validation.engine_work_limits import MAX_TOKENS
from store import compiled_modules
from tests.gateway.fake_replica import Answer, Exchange, FakeReplica, hold, reset
from tests.gateway.worker import PATIENCE_S, Stack, until

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
MB = 1024 * 1024
# Without machine code reading takes five times as long.
LONGEST_S = 0.05 if compiled_modules.state()[1] else 0.02
# Other processes take the caches: of so many measurements the least counts.
TRIES = 4
CHAT, TEXT, RESPONSES, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"
EVENTS = "text/event-stream"


class Made(NamedTuple):
    """``unit`` repeated up to a size, between ``before`` and ``after``."""

    before: bytes
    unit: bytes
    after: bytes

    def of(self, size: int) -> bytes:
        return (
            self.before
            + self.unit * ((size - len(self.before) - len(self.after)) // len(self.unit))
            + self.after
        )


def member(name: str, begin: bytes, unit: bytes, end: bytes, model: str = "alpha") -> Made:
    return Made(b'{"model":"%b","%b":%b' % (model.encode(), name.encode(), begin), unit, end + b"}")


def items(unit: bytes, status: int = 200) -> tuple[str, int, Made]:
    return CHAT, status, member("x", b"[1", unit, b"]")


def text(unit: bytes, status: int = 200) -> tuple[str, int, Made]:
    return CHAT, status, member("x", b'"', unit, b'"')


DEEP = b",%b1%b" % (b"[" * 60, b"]" * 60)
DEEP_OBJECTS = b",%b1%b" % (b'{"":' * 60, b"}" * 60)
# By kind: path, status of the answer, body.
BODIES: dict[str, tuple[str, int, Made]] = {
    "lists 62 deep": items(DEEP),
    "objects 62 deep": items(DEEP_OBJECTS),
    "lists 200 deep": items(b",%b%b" % (b"[" * 200, b"]" * 200), 400),
    "one list in another": (CHAT, 400, member("x", b"", b"[", b"")),
    "one object in another": (CHAT, 400, member("x", b"", b'{"":', b"")),
    "closing brackets": (CHAT, 400, member("x", b"[", b"]", b"")),
    "brackets in texts": (CHAT, 200, member("x", b'[""', b',"[[[[[["', b"]")),
    "empty lists": items(b",[]"),
    "empty objects": items(b",{}"),
    "empty texts": items(b',""'),
    "short texts": items(b',"abcd"'),
    "texts": items(b',"%b"' % (b"a" * 30)),
    "digits": items(b",1"),
    "floats": items(b",-1.5e-3"),
    "long numbers": items(b"," + b"1" * 9999),
    "words": items(b",null"),
    "one number": (CHAT, 400, member("x", b"", b"1", b"")),
    "space": (CHAT, 400, member("x", b"[", b" ", b"]")),
    "space between": items(b"," + b" " * 9999 + b"1"),
    "space before": (CHAT, 400, Made(b"", b"\n", b'{"model":"alpha"}')),
    "one text": text(b"a"),
    "newlines": text(rb"\n"),
    "quotes": text(rb"\""),
    "backslashes": text(rb"\\"),
    "escapes": text(rb"\u00e9"),
    "surrogates": text(rb"\ud83d\ude00"),
    "lone surrogates": text(rb"\ude00\ud83d", 400),
    "sparse escapes": text(rb"\n" + b"a" * 17),
    "not ASCII": text("é😀".encode()),
    "control characters": text(b"\n", 400),
    "bare quotes": (CHAT, 400, Made(b"", b'"', b"")),
    "zeros": (CHAT, 400, Made(b"", b"\0", b"")),
    "UTF-16": (CHAT, 400, Made(b"", '{"a":1}'.encode("utf-16-le"), b"")),
    "open text": (CHAT, 400, member("x", b'"', b"a", b"")),
    "no end": (CHAT, 400, member("x", b"[1", b",[1]", b"")),
    "comma at the end": (CHAT, 400, member("x", b"[1", b",[1]", b",]")),
    "two objects": (CHAT, 400, Made(b'{"model":"alpha"}', b'{"a":1}', b"")),
    "members": (CHAT, 400, Made(b'{"model":"alpha"', b',"abc":1', b"}")),
    "equal members": (CHAT, 400, Made(b'{"model":"alpha"', b',"n":1', b"}")),
    "members of a member": (CHAT, 200, member("x", b'{"a":1', b',"abc":1', b"}")),
    "long name": (CHAT, 200, Made(b'{"model":"alpha","', b"a", b'":1}')),
    "long escaped name": (CHAT, 200, Made(b'{"model":"alpha","', rb"\u0061", b'":1}')),
    "long model": (CHAT, 400, Made(b'{"model":"', b"a", b'"}')),
    "long n": (CHAT, 400, Made(b'{"model":"alpha","n":', b"1", b"}")),
    "list for n": (CHAT, 400, member("n", b"[1", b",1", b"]")),
    "stops": (TEXT, 400, member("stop", b'[""', b',""', b"]")),
    "long stop": (TEXT, 400, member("stop", b'"', b"a", b'"')),
    "stream options": (CHAT, 400, member("stream_options", b'{"a":1', b',"abc":1', b"}")),
    "template arguments": (CHAT, 400, member("chat_template_kwargs", b'{"a":1', b',"abc":1', b"}")),
    "long salt": (CHAT, 400, member("cache_salt", b'"', b"a", b'"')),
    "long priority": (CHAT, 400, member("priority", b"[1", b",1", b"]")),
    "messages": (
        CHAT,
        200,
        member("messages", b"[{}", b',{"role":"user","content":"%b"}' % (b"a" * 1700), b"]"),
    ),
    "empty messages": (CHAT, 400, member("messages", b"[{}", b",{}", b"]")),
    "image": (CHAT, 200, member("messages", b'[{"role":"user","content":"', b"QUJD", b'"}]')),
    "tools": (CHAT, 400, member("tools", b"[{}", b',{"type":"function"}', b"]")),
    "system": ("/v1/messages", 200, member("system", b'"', b"a", b'"')),
    "prompts": (TEXT, 400, member("prompt", b'[""', b',""', b"]")),
    "prompts of ids": (TEXT, 400, member("prompt", b"[[]", b",[1]", b"]")),
    "ids": (TEXT, 200, member("prompt", b"[1", b",1", b"]")),
    "input items": (RESPONSES, 400, member("input", b"[{}", b",{}", b"]")),
    "inputs": (VECTORS, 400, member("input", b'[""', b',""', b"]", "vectors")),
    "inputs of ids": (VECTORS, 400, member("input", b"[[]", b",[1]", b"]", "vectors")),
    "pairs": ("/v1/score", 400, member("text_1", b'"a","text_2":[""', b',""', b"]", "vectors")),
    "documents": ("/v1/rerank", 400, member("documents", b'[""', b',""', b"]", "vectors")),
    "tokens": ("/v1/detokenize", 200, member("tokens", b"[1", b",1", b"]")),
}
# Of these, bodies that are decoded at once have another status.
SMALL = {
    **dict.fromkeys(("one number", "space", "space before", "members", "equal members"), 200),
}
# By kind: content type, status of the answer, body.
ANSWERS: dict[str, tuple[str, int, Made]] = {
    "deep": ("application/json", 200, Made(b'{"x":[1', DEEP, b"]}")),
    "objects": ("application/json", 200, Made(b'{"x":[1', b",{}", b"]}")),
    "floats": ("application/json", 200, Made(b'{"x":[1', b",0.0123", b"]}")),
    "texts": ("application/json", 200, Made(b'{"x":[1', b',"\xc3\xa9"', b"]}")),
    "usages": ("application/json", 200, Made(b'{"x":[1', b',{"usage":{"a":1}}', b"]}")),
    "nested usages": ("application/json", 200, Made(b"", b'{"usage":', b"")),
    "long error": ("application/json", 200, Made(b'{"error":{"x":[1', b",[]", b"]}}")),
    "status 400": ("application/json", 400, Made(b'{"error":{"x":[1', b",[]", b"]}}")),
    "status 500": ("application/json", 500, Made(b'{"error":{"x":[1', b",[]", b"]}}")),
    "event": (EVENTS, 200, Made(b'data: {"x":[1', DEEP, b"]}\n\n")),
    "event of choices": (EVENTS, 200, Made(b'data: {"choices":[{}', b',{"index":1}', b"]}\n\n")),
    "event of usage": (EVENTS, 200, Made(b'data: {"usage":{"x":[1', b",{}", b"]}}\n\n")),
    "event of another type": (EVENTS, 200, Made(b'data: {"choices":"","x":[1', b",[]", b"]}\n\n")),
    "event of an error": (EVENTS, 200, Made(b'data: {"error":{"x":[1', b",[]", b"]}}\n\n")),
    "lines of data": (EVENTS, 200, Made(b"", b"data:\n", b"\n")),
    "lines of CR": (EVENTS, 200, Made(b"", b"data:\r", b"\r")),
    "events": (EVENTS, 200, Made(b"", b'data: {"choices":[]}\n\n', b"")),
    "tiny events": (EVENTS, 200, Made(b"", b"data:1\n\n", b"")),
    "empty events": (EVENTS, 200, Made(b"", b"\n\n", b"")),
    "comments": (EVENTS, 200, Made(b"", b":\n\n", b"")),
    "long comment": (EVENTS, 200, Made(b": ", b"a", b"\n\n")),
}

# Asks a worker without a pause, and says for each line of its input how long the worker was busy at most
# between a question and its answer: in CPU time, which other processes do not add to.
HEARTBEAT = """
import contextlib, os, select, socket, sys, time
with contextlib.suppress(PermissionError):  # else the time that it waits for a core counts as well
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
port, pid = map(int, sys.argv[1:3])
clock = (~pid << 3) | 2
body = b'{"model":"nobody"}'
head = b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: a\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body)
sock = socket.create_connection(("127.0.0.1", port), source_address=(sys.argv[3], 0))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
longest = 0.0
while True:
    before = time.clock_gettime(clock)
    sock.sendall(head + body)
    answer = sock.recv(65536)
    longest = max(longest, time.clock_gettime(clock) - before)
    assert answer.startswith(b"HTTP/1.1 404") and answer.endswith(b"}"), answer
    if select.select([sys.stdin], [], [], 0)[0]:
        if not sys.stdin.readline():
            break
        print(longest, flush=True)
        longest = 0.0
"""


class Heartbeat:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def longest_s(self) -> float:
        """The longest stall since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        return float(await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S))

    async def during(self, ask: Callable[[], Awaitable[httpx.Response]]) -> tuple[int, float]:
        """The status of an answer, and the longest stall on the way to it."""
        for _ in range(TRIES):
            status, stall_s = (await ask()).status_code, await self.longest_s()
            if stall_s <= LONGEST_S:
                break
        return status, stall_s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replicas(shared: Stack) -> list[FakeReplica]:
    made = [await shared.replica("writes"), await shared.replica("embeds", model="vectors")]
    await shared.ready(*made)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def heartbeat(shared: Stack) -> AsyncIterator[Heartbeat]:
    """Of a client at another address than those of the tests."""
    port, pid = shared.client_socket.getsockname()[1], shared.workers[0].pid
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HEARTBEAT, str(port), str(pid), "127.0.0.2",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    yield Heartbeat(process)
    # To the end of its output: else its transport is closed by a later collection.
    await process.communicate(b"")
    assert process.returncode == 0


SIZES = [
    200_000,
    300_000,
    pytest.param(MB, marks=pytest.mark.long),
    pytest.param(16 * MB, marks=pytest.mark.long),
]


@pytest.mark.parametrize("size", SIZES)
async def test_no_body_of_a_client_stalls_the_others(
    shared: Stack, replicas: list[FakeReplica], heartbeat: Heartbeat, size: int
) -> None:
    for replica in replicas:
        replica.answer = whole(b"{}", 200, "application/json")
    found = {}
    for kind, (path, _, made) in BODIES.items():
        found[kind] = await heartbeat.during(partial(shared.http.post, path, content=made.of(size)))
    expected = {kind: status for kind, (_, status, _) in BODIES.items()}
    if size <= MAX_DECODED:
        expected |= SMALL
    if size > 2 * MAX_TOKENS:
        expected["tokens"] = 400
    assert {kind: status for kind, (status, _) in found.items()} == expected
    if size >= MB:
        assert {kind: stall_s for kind, (_, stall_s) in found.items() if stall_s > LONGEST_S} == {}


@pytest.mark.parametrize("size", SIZES)
async def test_no_answer_of_a_replica_stalls_the_others(
    shared: Stack, replicas: list[FakeReplica], heartbeat: Heartbeat, size: int
) -> None:
    found = {}
    for kind, (content_type, status, made) in ANSWERS.items():
        replicas[0].answer = whole(made.of(size), status, content_type)
        found[kind] = await heartbeat.during(partial(shared.chat, stream=content_type == EVENTS))
    if size >= MB:
        assert {kind: stall_s for kind, (_, stall_s) in found.items() if stall_s > LONGEST_S} == {}


@pytest.mark.long
@pytest.mark.parametrize("unit", [b",0.0123", DEEP])
async def test_many_large_answers_at_once_do_not_stall_the_others(
    shared: Stack, replicas: list[FakeReplica], heartbeat: Heartbeat, unit: bytes
) -> None:
    count, body, let_go = 64, Made(b'{"x":[1', unit, b"]}").of(2 * MB), asyncio.Event()

    async def answer(exchange: Exchange) -> None:
        await let_go.wait()
        await exchange.reply(body)

    replicas[0].answer = answer
    replicas[0].hits.clear()
    replicas[0].report(bound=count)
    await shared.shows(replicas[0], bound=count)
    asked = [asyncio.create_task(shared.chat()) for _ in range(count)]
    await until(lambda: len(replicas[0].hits) == count, "all are asked")
    await heartbeat.longest_s()
    let_go.set()
    answers = await asyncio.gather(*asked)
    assert {(answer.status_code, answer.content == body) for answer in answers} == {(200, True)}
    assert await heartbeat.longest_s() < LONGEST_S


Clients = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


async def connected(shared: Stack, count: int) -> Clients:
    return [await asyncio.open_connection(*shared.client_socket.getsockname()) for _ in range(count)]


def ask(clients: Clients, *, stream: bool) -> None:
    asked = {"model": "alpha", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    body = json.dumps(asked).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    for _, writer in clients:
        writer.write(head.encode() + body)


@pytest.mark.long
async def test_requests_whose_connections_time_out_together_do_not_stall_the_others(
    shared: Stack, replicas: list[FakeReplica], heartbeat: Heartbeat
) -> None:
    """A thousand at one moment, of which the backlog of their replica, which accepts none, takes two."""
    count = 1200
    deaf = await shared.replica("deaf", bound=count, frames=False)
    await shared.ready(deaf, replicas[1])
    clients = await connected(shared, count)
    deaf.stop_accepting()
    await heartbeat.longest_s()
    ask(clients, stream=False)
    answers = [asyncio.create_task(reader.read()) for reader, _ in clients]
    await until(lambda: sum(each.done() for each in answers) > count - 9, "they have timed out")
    stall_s = await heartbeat.longest_s()
    await deaf.stop()
    shared.replicas.remove(deaf)
    statuses = {(await each).partition(b"\r\n")[0] for each in answers}
    for _, writer in clients:
        writer.close()
    await shared.ready(*replicas)
    assert statuses == {b"HTTP/1.1 503 Service Unavailable"}
    assert stall_s <= LONGEST_S


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", ["answers", "replica closes", "replica resets", "clients reset"])
async def test_requests_that_begin_end_and_fail_together_do_not_stall_the_others(
    shared: Stack, replicas: list[FakeReplica], heartbeat: Heartbeat, stream: bool, end: str
) -> None:
    """A thousand clients at one moment; their replica answers all at one moment, or dies, or they leave."""
    count, let_go, answers = 1200, asyncio.Event(), []
    first = await shared.replica("first", bound=count, frames=end != "replica resets")
    first.answer = hold(let_go)
    await shared.ready(first, replicas[1])
    clients = await connected(shared, count)
    stalls = {"connect": await heartbeat.longest_s()}
    ask(clients, stream=stream)
    await until(lambda: len(first.hits) == count, "all are asked")
    stalls["begin"] = await heartbeat.longest_s()
    if end.startswith("replica"):
        second = await shared.replica("second", bound=count)
        shared.controller.set(first, second, replicas[1])
        await shared.shows(second, admissible=True)
        await heartbeat.longest_s()
        if end == "replica resets":
            for connection in first.connections:
                reset(connection.transport)
        await first.stop()
        shared.replicas.remove(first)
    if end == "clients reset":
        for _, writer in clients:
            reset(writer.transport)
        await until(lambda: all(hit.gone.is_set() for hit in first.hits), "their requests are cancelled")
    let_go.set()
    if end != "clients reset":
        answers = [await reader.read() for reader, _ in clients]
    stalls["end"] = await heartbeat.longest_s()
    for _, writer in clients:
        writer.close()
    assert {answer.partition(b"\r\n")[0] for answer in answers} <= {b"HTTP/1.1 200 OK"}
    await shared.ready(*replicas)
    assert {what: stall_s for what, stall_s in stalls.items() if stall_s > LONGEST_S} == {}


def whole(body: bytes, status: int, content_type: str) -> Answer:
    async def answer(exchange: Exchange) -> None:
        await exchange.reply(body, status=status, content_type=content_type)

    return answer


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("unit", [b",0.0123", DEEP, b',"\\u00e9"'])
async def test_no_answer_to_a_shared_call_stalls_the_others(
    shared: Stack, replicas: list[FakeReplica], heartbeat: Heartbeat, size: int, unit: bytes
) -> None:
    """Two requests wait for a third one, and share a call, whose answer is split."""
    count = 32
    let_go = asyncio.Event()
    vector = Made(b'{"index":%d,"embedding":[1', unit, b"]}")

    async def embed(exchange: Exchange) -> None:
        inputs = exchange.json["input"]
        if len(inputs) == 1:
            await let_go.wait()
        items = [vector.of(size // (2 * count)) % i for i in range(len(inputs))]
        await exchange.reply(b'{"data":[%b]}' % b",".join(items))

    replicas[1].answer = embed
    replicas[1].hits.clear()

    async def ask(inputs: int) -> httpx.Response:
        return await shared.http.post(VECTORS, json={"model": "vectors", "input": ["a"] * inputs})

    first = asyncio.create_task(ask(1))
    await until(lambda: len(replicas[1].hits) == 1)
    for _ in range(5 * TRIES):  # the window is 2 ms
        replicas[1].hits.clear()
        answers = await asyncio.gather(ask(count - 1), ask(count))
        if len(replicas[1].hits) == 1:
            break
    let_go.set()
    await first
    assert [hit.json["input"] for hit in replicas[1].hits] == [["a"] * (2 * count - 1)]
    assert [len(answer.json()["data"]) for answer in answers] == [count - 1, count]
    stall_s = await heartbeat.longest_s()
    if size >= MB:
        assert stall_s < LONGEST_S
