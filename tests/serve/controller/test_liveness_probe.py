"""The probe: a silent replica is probed at its own port before it is removed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from policy.wire.headers import SECRET_HEADER
from serve.controller import liveness_probe
from serve.state.replica_registry import GONE_S, SILENT_S, ReplicaRegistry
from tests.serve.replicas import replica


async def test_refused_connections_remove_silent_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_probe, "PERIOD_S", 0.0)
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}"
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    alive = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    registry = ReplicaRegistry(epoch=1.0)
    for made in (replica("dead", url=dead), replica("alive", url=alive), replica("unborn")):
        registry.put(made, now=0.0)
    now, lost = SILENT_S + 0.1, []
    probing = asyncio.ensure_future(liveness_probe.probe_silent(registry, "s", lost.append, lambda: now))
    while len(asked) < 3:  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0)
    assert [gone.id for gone in lost] == ["dead"]
    assert f"{SECRET_HEADER}: s".encode() in asked[0]
    assert [kept.id for kept in registry.fleet(now).replicas] == ["alive", "unborn"]

    now = GONE_S + 0.1
    while len(lost) < 3:  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0)
    assert registry.fleet(now).replicas == ()
    probing.cancel()
    await asyncio.wait([probing])
    server.close()
    await server.wait_closed()
