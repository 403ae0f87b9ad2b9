"""A fake OpenAI-compatible provider on a raw socket, with TLS if a context is given."""

from __future__ import annotations

import asyncio
import ssl

from tests.gateway.fake_replica import Answer, Exchange, FakeConnection, FakeServer, answer_json


class FakeUpstream(FakeServer):
    """``hits`` are the received requests; ``answer`` decides what each gets."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self._tls = tls
        self.hits: list[Exchange] = []
        self.answer: Answer = answer_json

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: FakeConnection(self), "127.0.0.1", self.port, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    async def respond(self, exchange: Exchange) -> None:
        self.hits.append(exchange)
        await self.answer(exchange)
