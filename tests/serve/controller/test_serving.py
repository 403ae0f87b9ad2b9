"""The controller's HTTP server, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from serve.controller.serving import serve_app
from store.state_dir import listen
from tests.ports import free_ports


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@pytest.mark.slow
async def test_a_connection_is_kept_for_longer_than_clients_keep_it() -> None:
    (port,) = free_ports(1)
    sock = listen("127.0.0.1", port)
    serving = asyncio.create_task(serve_app(answer, sock))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for idle_s in (0.0, 5.5):
        await asyncio.sleep(idle_s)
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert head.startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()
    serving.cancel()
    await asyncio.wait([serving])
    sock.close()
