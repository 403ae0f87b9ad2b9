"""The simulated engine on loopback, in its own thread, with a record of its requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.ports import free_ports
from tests.serve.sim_driver import engine_of, spec


class Endpoint:
    """A server at ``url``. ``asked`` are the bodies of POSTs, ``headers`` those of the last request.

    With ``strict`` it refuses fields that OpenAI does not have. ``on_ask`` is called at each POST.
    """

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.headers: dict[bytes, bytes] = {}
        self.strict = False
        self.on_ask: Callable[[], None] = lambda: None

    @contextmanager
    def served(self) -> Iterator[None]:
        """Serve while the block runs."""
        ready = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        thread.start()
        assert ready.wait(30)
        try:
            yield
        finally:
            self._server.should_exit = True
            thread.join()

    async def _serve(self, ready: threading.Event) -> None:
        async with engine_of(spec(max_model_len=20_000)) as engine:
            app = self._recorded(engine.app)  # type: ignore[arg-type] # the engine's port has its own names
            config = uvicorn.Config(app, port=self.port, lifespan="off", ws="none", log_config=None)
            self._server = uvicorn.Server(config)
            config.load()
            self._server.lifespan = config.lifespan_class(config)
            await self._server.startup()
            ready.set()
            await self._server.main_loop()
            await self._server.shutdown()

    def _recorded(self, app: ASGIApp) -> ASGIApp:
        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            self.headers = dict(scope["headers"])
            if scope["method"] != "POST":
                await app(scope, receive, send)
                return
            body = b""
            more = True
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            output = json.loads(body)
            self.asked.append(output)
            self.paths.append(scope["path"])
            self.on_ask()
            if self.strict and "ignore_eos" in output:
                await send({"type": "http.response.start", "status": 400, "headers": []})
                error = b'{"error": {"message": "Unknown parameter: ignore_eos"}}'
                await send({"type": "http.response.body", "body": error})
                return
            given = False

            async def again() -> Message:
                nonlocal given
                if given:
                    return await receive()
                given = True
                return {"type": "http.request", "body": body, "more_body": False}

            await app(scope, again, send)

        return recorded
