"""The client port over TLS: the tests of plain connections again, and what a handshake may cost."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from gateway.http import acceptor
from store.tls_files import client_context, server_context
from tests.gateway.http.test_server import (  # noqa: F401 - they run here, over TLS
    CLOSE,
    Port,
    answers,
    on_uvloop,
    post,
    test_a_large_body_arrives_whole,
    test_a_lost_connection_is_freed_without_a_collection,
    test_clients_that_do_not_read_whole_answers_are_bounded,
    test_endless_heads_and_framing_are_refused,
    test_pipelined_requests_are_answered_in_order,
    test_requests_are_parsed_alike_however_their_bytes_are_cut,
)
from tests.store.test_tls_files import pair


@pytest.fixture(autouse=True)
def over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = pair(tmp_path / "server.pem")
    monkeypatch.setattr(Port, "tls", (server_context(files, "tls"), client_context(files, "tls")))


@on_uvloop
async def test_the_app_sees_who_asks_and_by_which_scheme(port: Port) -> None:
    ((_, _, body),) = answers(await port.ask(post(b"", CLOSE)))
    assert json.loads(body)["sender"] == ["127.0.0.1", "https"]


@pytest.mark.slow
@on_uvloop
async def test_a_slow_reader_holds_the_app_back(port: Port) -> None:
    sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": bytes(64 * 1024), "more_body": True})
            sent += 1
        await send({"type": "http.response.body", "body": b""})

    port.app = app
    reader, writer = await port.open()
    writer.write(post(b"", CLOSE))
    await reader.readexactly(1)
    await asyncio.sleep(0.3)
    assert 0 < sent < 500  # some is in buffers of the kernel
    assert len(await reader.read()) > 1000 * 64 * 1024


@on_uvloop
async def test_plain_http_is_refused_and_others_are_served(port: Port) -> None:
    await port.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(post(b"", CLOSE))
    assert b"HTTP" not in await reader.read()
    writer.close()
    assert answers(await port.ask(post(b"", CLOSE)))[0][0] == 200


def test_handshakes_that_stop_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "MOST_HANDSHAKES", 3)
    monkeypatch.setattr(acceptor, "LAST_HANDSHAKES_S", 0.05)

    @on_uvloop
    async def run(port: Port) -> None:
        await port.start()
        silent = [socket.create_connection(("127.0.0.1", port.port)) for _ in range(5)]
        for each in silent:
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        for oldest in silent[:2]:
            assert await asyncio.wait_for(loop.sock_recv(oldest, 1), 10) == b""
        assert answers(await port.ask(post(b"", CLOSE)))[0][0] == 200
        port.server.draining = True
        await port.close()
        assert await asyncio.wait_for(loop.sock_recv(silent[4], 1), 10) == b""
        for each in silent:
            each.close()

    run()
