"""Heartbeats of a replica host: it sends its state and usage to the controller, and obeys the answer.

One is sent at each change, and at least every :data:`policy.wire.heartbeat.HEARTBEAT_PERIOD_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import httpx
import msgspec

from policy.wire.headers import SECRET_HEADER
from policy.wire.heartbeat import HEARTBEAT_PERIOD_S, Orders
from policy.wire.reports import EngineReport
from serve.engine.adapters.usage import AdapterUsage
from serve.engine.step_stats import merge
from serve.host.replica_host import ReplicaHost

# Replaces the network, for tests.
Transport = httpx.AsyncBaseTransport | None


async def send_heartbeats(hosts: Sequence[ReplicaHost], transport: Transport = None) -> None:
    """Send heartbeats of ``hosts`` until cancelled."""
    await asyncio.gather(*(_beat(host, transport) for host in hosts))


async def send_last_heartbeats(hosts: Sequence[ReplicaHost], transport: Transport = None) -> None:
    """Report to the controller, once, that ``hosts`` have stopped."""
    await asyncio.gather(*(_last_beat(host, transport) for host in hosts))


async def _beat(host: ReplicaHost, transport: Transport) -> None:
    """Send heartbeats of ``host``; usage is kept while the controller does not answer."""
    usage = AdapterUsage()
    engine: EngineReport | None = None
    async with _client(host, 2.0, transport) as client:
        while True:
            host.changed.clear()
            heartbeat = host.take_heartbeat()
            for use in heartbeat.uses:
                usage.add(use)
            engine = merge(engine, heartbeat.engine)
            heartbeat = msgspec.structs.replace(heartbeat, uses=usage.pending(), engine=engine)
            # The answer may come from a controller that is stopping, or from another process on its port.
            with contextlib.suppress(httpx.HTTPError, msgspec.MsgspecError):
                answer = await client.post("/replicas", content=msgspec.json.encode(heartbeat))
                if answer.status_code == 200:
                    usage.clear()
                    engine = None
                    host.obey(msgspec.json.decode(answer.content, type=Orders))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_PERIOD_S):
                    await host.changed.wait()


async def _last_beat(host: ReplicaHost, transport: Transport) -> None:
    with contextlib.suppress(httpx.HTTPError):
        async with _client(host, 1.0, transport) as client:
            await client.post("/replicas", content=msgspec.json.encode(host.take_heartbeat()))


def _client(host: ReplicaHost, timeout_s: float, transport: Transport) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://{host.spec.controller}", headers={SECRET_HEADER: host.spec.secret},
        timeout=timeout_s, trust_env=False, transport=transport,
    )  # fmt: skip
