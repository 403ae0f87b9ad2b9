"""The HTTP server of internal ports: it wakes for the date and for its end alone."""

from __future__ import annotations

import asyncio
import socket
from email.utils import parsedate_to_datetime

import httpx
import uvicorn
from starlette.responses import PlainTextResponse

from store.event_loop.uvicorn_server import UvicornServer


class Counting(UvicornServer):
    """Counts how often it looks whether it should end."""

    looks = 0

    async def on_tick(self, counter: int) -> bool:
        self.looks += 1
        return await super().on_tick(counter)


async def test_it_answers_with_the_date_and_ends_when_told() -> None:
    config = uvicorn.Config(
        PlainTextResponse("here"), lifespan="off", log_config=None, access_log=False, ws="none"
    )
    server = Counting(config)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/"
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.get(url)
        assert answer.text == "here"
        assert parsedate_to_datetime(answer.headers["date"]).utcoffset() is not None
        looks = server.looks
        assert not server.should_exit
        server.should_exit = True
        await serving
        # Woken by that, not by the clock.
        assert server.looks == looks + 1


async def test_its_end_may_be_asked_for_before_it_begins() -> None:
    server = Counting(uvicorn.Config(PlainTextResponse("here"), lifespan="off", log_config=None))
    server.should_exit = True
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await server.serve(sockets=[sock])
    assert server.looks == 0
