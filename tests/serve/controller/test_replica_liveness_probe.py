"""The probe: a silent replica is probed at its own port before it is removed."""

from __future__ import annotations

import asyncio
import socket

import pytest

from policy.types import Replica
from policy.wire.headers import SECRET_HEADER
from serve.controller import replica_liveness_probe
from serve.controller.replica_liveness_probe import STALLED_S, probe_silent
from serve.state.replica_registry import GONE_S, HUNG_S, SILENT_S, ReplicaRegistry
from tests.serve.replicas import replica


async def test_refused_connections_remove_silent_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_liveness_probe, "PERIOD_S", 0.0)
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    refuses = socket.socket()
    refuses.bind(("127.0.0.1", 0))  # it does not listen, and nobody else can at its port
    dead = f"http://127.0.0.1:{refuses.getsockname()[1]}"
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    alive = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    registry = ReplicaRegistry(epoch=1.0)
    for made in (replica("dead", url=dead), replica("alive", url=alive), replica("unborn")):
        registry.put(made, now=0.0)
    now, lost, hung = SILENT_S + 0.1, [], []

    async def hangs(replica: Replica) -> None:
        hung.append(replica.id)

    rounds = 0

    def clock() -> float:
        nonlocal rounds
        rounds += 1
        return now

    async def after_rounds(count: int) -> None:
        until = rounds + count
        while rounds < until:  # noqa: ASYNC110 - the test's own timeout bounds it
            await asyncio.sleep(0)

    async def pass_until(instant: float) -> None:
        """No longer at once than a round may take."""
        nonlocal now
        while now < instant:
            now = min(instant, now + STALLED_S / 2)
            await after_rounds(2)

    probing = asyncio.ensure_future(probe_silent(registry, "s", lost.append, hangs, clock))
    while len(asked) < 3:  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0)
    assert [gone.id for gone in lost] == ["dead"]
    assert f"{SECRET_HEADER}: s".encode() in asked[0]
    assert [kept.id for kept in registry.fleet(now).replicas] == ["alive", "unborn"]

    await pass_until(GONE_S + 0.1)
    while len(lost) < 3:  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0)
    assert registry.fleet(now).replicas == ()
    assert hung == []
    await pass_until(HUNG_S + 0.1)
    while len(hung) < 3:  # noqa: ASYNC110 - the test's own timeout bounds it
        await asyncio.sleep(0)
    assert sorted(hung) == ["alive", "dead", "unborn"]

    # The controller itself was stopped for an hour: that the replica was silent says nothing.
    registry.put(replica("alive", url=alive), now)
    now += 3600.0
    await after_rounds(3)
    assert [kept.id for kept in registry.fleet(now).replicas] == ["alive"]
    probing.cancel()
    await asyncio.wait([probing])
    server.close()
    await server.wait_closed()
    refuses.close()
