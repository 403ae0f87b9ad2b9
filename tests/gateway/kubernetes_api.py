"""A double of the API server of Kubernetes: list and watch of one service's EndpointSlices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit


class KubernetesApi:
    """Endpoints are ``HOST:PORT``, one slice each. ``paths`` are the paths and queries of requests."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.forgotten = 0
        self._version = 1
        self._slices: dict[str, dict[str, Any]] = {}
        self._history: list[dict[str, Any]] = []
        self._changed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Close all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def put(self, endpoint: str, *, ready: bool | None = True, port_name: str = "http") -> None:
        """Add an endpoint, or change whether it is ready."""
        kind = "MODIFIED" if endpoint in self._slices else "ADDED"
        host, _, port = endpoint.rpartition(":")
        conditions = {"ready": ready, "terminating": ready is False}
        self._change(kind, endpoint, {
            "endpoints": [{"addresses": [host], "conditions": conditions}],
            "ports": [{"port": 9, "name": "metrics"}, {"port": int(port), "name": port_name}],
        })  # fmt: skip

    def delete(self, endpoint: str) -> None:
        self._change("DELETED", endpoint, self._slices[endpoint])

    def _change(self, kind: str, endpoint: str, content: dict[str, Any]) -> None:
        self._version += 1
        changed = {**content, "metadata": {"name": endpoint, "resourceVersion": str(self._version)}}
        if kind == "DELETED":
            del self._slices[endpoint]
        else:
            self._slices[endpoint] = changed
        self._history.append({"type": kind, "object": changed})
        self._changed.set()
        self._changed = asyncio.Event()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                target = line.split()[1].decode()
                while (await reader.readline()).strip():
                    pass
                self.paths.append(target)
                query = parse_qs(urlsplit(target).query)
                if "watch" not in query:
                    version = {"metadata": {"resourceVersion": str(self._version)}}
                    body = json.dumps({**version, "items": list(self._slices.values())}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                async for event in self._events(int(query["resourceVersion"][0])):
                    data = json.dumps(event).encode() + b"\n"
                    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _events(self, version: int) -> AsyncIterator[dict[str, Any]]:
        if self.forgotten:
            self.forgotten -= 1
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
            return
        while True:
            changed = self._changed
            for event in self._history:
                if int(event["object"]["metadata"]["resourceVersion"]) > version:
                    version = int(event["object"]["metadata"]["resourceVersion"])
                    yield event
            yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
            await changed.wait()
