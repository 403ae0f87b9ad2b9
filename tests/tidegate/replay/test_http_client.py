"""Connections are kept, replaced if the server has closed them, and fail with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tidegate.replay.http_client import STALE_S, ReplayConnectionPool, ResponseBody

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Server:
    """Counts connections, and gives answers in order; an empty one closes the connection after ``held_s``."""

    def __init__(self, *answers: bytes, held_s: float = 0.0) -> None:
        self.held_s = held_s
        self.connections = 0
        self.heads: list[bytes] = []
        self._answers = list(answers)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while self._answers:
            try:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
            except asyncio.IncompleteReadError:
                break
            answer = self._answers.pop(0)
            if not answer:
                await asyncio.sleep(self.held_s)
                break
            writer.write(answer)
        writer.close()

    @asynccontextmanager
    async def pool(self, key: str = "", path: str = "") -> AsyncIterator[ReplayConnectionPool]:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{path}"
        pool = ReplayConnectionPool(url, key, headers={"x-name": "value"})
        async with server:
            yield pool
            pool.close()


async def get(pool: ReplayConnectionPool) -> bytes:
    answer = ResponseBody()
    assert await pool.get("/v1/models", answer) == 200
    return answer.body


async def test_a_connection_is_kept_and_the_key_is_sent() -> None:
    server = Server(ANSWER, ANSWER)
    async with server.pool("k-1", "/base/v1/") as pool:
        assert (await get(pool), await get(pool)) == (b"ok", b"ok")
    assert server.connections == 1
    assert server.heads[0].startswith(b"GET /base/v1/models HTTP/1.1\r\n")
    assert b"authorization: Bearer k-1\r\nx-name: value\r\n" in server.heads[0]


async def test_a_closed_idle_connection_is_replaced() -> None:
    server = Server(ANSWER, b"", ANSWER)
    async with server.pool() as pool:
        assert (await get(pool), await get(pool)) == (b"ok", b"ok")
    assert server.connections == 2


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "closed before"),
        (b"HTTP/1.1 200 OK\r\nx: y", "closed before"),
        (b"SMTP ready\r\n", "no answer of HTTP"),
    ],
)
async def test_invalid_answers_are_errors(answer: bytes, why: str) -> None:
    async with Server(answer).pool() as pool:
        with pytest.raises(OSError, match=why):
            await get(pool)


async def test_an_answer_may_end_with_its_connection() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\n\r\nok")
    async with server.pool() as pool:
        assert await get(pool) == b"ok"


@pytest.mark.parametrize("kept", [False, True])
async def test_a_request_that_the_server_had_is_not_sent_again(kept: bool) -> None:
    server = Server(*[ANSWER] * kept, b"", ANSWER, held_s=2 * STALE_S if kept else 0.0)
    async with server.pool() as pool:
        if kept:
            await get(pool)
        with pytest.raises(ConnectionError, match="before the answer was complete"):
            await get(pool)
    assert (server.connections, len(server.heads)) == (1, 1 + kept)


async def test_a_request_is_not_repeated_after_a_partial_answer() -> None:
    half = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf"
    server = Server(ANSWER, half)  # and closes the connection, without further answers
    async with server.pool() as pool:
        await get(pool)
        with pytest.raises(ConnectionError, match="before the answer was complete"):
            await get(pool)
    assert (server.connections, len(server.heads)) == (1, 2)


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:8080", "http://"])
def test_other_urls_than_http_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="no URL"):
        ReplayConnectionPool(url)
