"""Requests drawn at random and damaged, on raw sockets: none is answered by a fault of the gateway's own."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import psutil
import pytest

from tests.gateway.worker import Stack

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
MB = 1024 * 1024
PATHS = (
    b"/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/embeddings "
    b"/v1/messages/count_tokens /v1/models /health /tokenize /v1/rerank /v1/score /nope /metrics * "
    b"http://x/v1/models //v1 /v1?x=%00"
).split()
METHODS = [b"POST"] * 9 + [b"GET", b"HEAD", b"OPTIONS", b"PUT", b"TRACE", b"PRI", b"CONNECT", b"\x16\x03"]
NAMES = (  # noqa: SIM905
    "messages prompt input stream stream_options n max_tokens max_completion_tokens stop tools tool_choice "
    "response_format logprobs top_logprobs echo seed temperature system metadata user priority cache_salt "
    "chat_template_kwargs suffix documents query text_1 text_2 tokens structured_outputs model thinking"
).split()
KEYS = ("type", "text", "role", "content", "name", "function", "image_url")
VALUES = (
    None,
    True,
    0,
    -1,
    2**63,
    10**40,
    1e308,
    "",
    "a",
    "\0",
    "é😀",
    "auto",
    "required",
    "x" * 5000,
    "user",
)
HEADERS = (
    b"host: b", b"host:", b"host: a b", b"expect: 100-continue", b"content-encoding: gzip",
    b"transfer-encoding: chunked", b"transfer-encoding: gzip, chunked", b"connection: close",
    b"connection: upgrade\r\nupgrade: h2c", b"authorization: \xff", b"x-request-id: " + b"a" * 300,
    b"x-session-id: \xff\xfe", b"x-stainless-timeout: inf", b"traceparent: 00-zz", b"origin: http://[abc",
    b"accept: \0", b"x: " + b"y" * 9000, b": x", b"a b: c", b"content-type: text/xml",
)  # fmt: skip


def drawn(chance: Random, depth: int = 0) -> Any:
    kind = chance.randrange(4) if depth < 4 else 2
    if kind == 0:
        return [drawn(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 1:
        return {chance.choice(KEYS): drawn(chance, depth + 1) for _ in range(chance.randrange(4))}
    return chance.choice(VALUES)


def damaged(data: bytes, chance: Random) -> bytes:
    if chance.random() < 0.2 and data:
        at = chance.randrange(len(data))
        data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    return data[: chance.randrange(len(data) + 1)] if chance.random() < 0.05 else data


def request(chance: Random) -> bytes:
    body: dict[str, Any] = {
        "model": chance.choice(["alpha", "alpha", "vectors", "vectors", "nobody", None, ""])
    }
    if chance.random() < 0.6:
        body |= {"messages": [{"role": "user", "content": "hi"}], "prompt": ["x"], "input": "x"}
    body |= {chance.choice(NAMES): drawn(chance) for _ in range(chance.randrange(4))}
    raw = damaged(json.dumps(body).encode(), chance)
    headers = [b"host: a", b"content-length: %d" % len(raw)]
    if chance.random() < 0.2:
        headers[1] = b"transfer-encoding: chunked"
        parts = [raw[at : at + 7] for at in range(0, len(raw), 7)]
        raw = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    if chance.random() < 0.3:
        headers += chance.sample(HEADERS, 2)
    line = b"%b %b HTTP/1.1" % (chance.choice(METHODS), chance.choice(PATHS[:6] * 4 + PATHS))
    return damaged(b"%b\r\n%b\r\n\r\n%b" % (line, b"\r\n".join(headers), raw), chance) * chance.choice(
        [1, 1, 2]
    )


async def send(port: int, data: bytes, cut: int) -> bytes:
    """What came back within a moment; the connection is aborted."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    try:
        writer.write(data[:cut])
        await asyncio.sleep(0)
        writer.write(data[cut:])
        async with asyncio.timeout(0.1):
            while part := await reader.read(65536):
                found += part
    except (OSError, TimeoutError):
        pass
    writer.transport.abort()
    return found


async def test_damaged_requests_find_no_fault_of_the_gateway(shared: Stack) -> None:
    await shared.ready(await shared.replica("damaged"), await shared.replica("embeds", model="vectors"))
    port, chance = shared.client_socket.getsockname()[1], Random(3)  # noqa: S311 - draws, not secrets
    worker = psutil.Process(shared.workers[0].pid)
    before = worker.memory_info().rss
    for _ in range(25):
        sent = [request(chance) for _ in range(24)]
        answers = await asyncio.gather(*(send(port, each, chance.randrange(len(each) + 1)) for each in sent))
        assert [pair for pair in zip(sent, answers, strict=True) if b" 500 Internal" in pair[1]] == []
    assert (await shared.chat()).status_code == 200
    assert worker.memory_info().rss - before < 32 * MB
