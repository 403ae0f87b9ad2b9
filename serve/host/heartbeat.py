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
from policy.wire.heartbeat import HEARTBEAT_PERIOD_S, Heartbeat, Orders
from policy.wire.reports import EngineReport
from serve.engine.adapters.usage import AdapterUsage
from serve.engine.step_stats import merge
from serve.host.host import ReplicaHost


async def beat(host: ReplicaHost) -> None:
    """Send heartbeats of ``host`` until cancelled; usage is kept while the controller does not answer."""
    url = f"http://{host.spec.controller}/replicas"
    usage = AdapterUsage()
    engine: EngineReport | None = None
    async with httpx.AsyncClient(
        timeout=2.0, headers={SECRET_HEADER: host.spec.secret}, trust_env=False
    ) as client:
        while True:
            host.changed.clear()
            for use in host.take_uses():
                usage.add(use)
            engine = merge(engine, host.take_engine())
            heartbeat = Heartbeat(
                replica=host.snapshot(), uses=usage.pending(), engine=engine, power=host.power
            )
            # The answer may come from a controller that is stopping, or from another process on its port.
            with contextlib.suppress(httpx.HTTPError, msgspec.MsgspecError):
                answer = await client.post(url, content=msgspec.json.encode(heartbeat))
                if answer.status_code == 200:
                    usage.clear()
                    engine = None
                    host.obey(msgspec.json.decode(answer.content, type=Orders))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_PERIOD_S):
                    await host.changed.wait()


async def beat_all(hosts: Sequence[ReplicaHost]) -> None:
    """Send heartbeats of ``hosts`` until cancelled."""
    await asyncio.gather(*(beat(host) for host in hosts))


async def last_beats(hosts: Sequence[ReplicaHost]) -> None:
    """Report to the controller, once, that ``hosts`` have stopped."""
    await asyncio.gather(*(last_beat(host) for host in hosts))


async def last_beat(host: ReplicaHost) -> None:
    """Report to the controller, once, that the host has stopped."""
    url = f"http://{host.spec.controller}/replicas"
    headers = {SECRET_HEADER: host.spec.secret}
    heartbeat = Heartbeat(replica=host.snapshot(), uses=host.take_uses(), engine=host.take_engine())
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(timeout=1.0, headers=headers, trust_env=False) as client:
            await client.post(url, content=msgspec.json.encode(heartbeat))
