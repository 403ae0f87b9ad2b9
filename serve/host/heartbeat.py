"""Heartbeats of a replica host: it sends its state and usage to the controller, and obeys the answer.

One is sent at each change, and at least every :data:`policy.wire.heartbeat.HEARTBEAT_PERIOD_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import httpx
import msgspec

from policy.types import ReplicaPhase
from policy.wire.controller import REPLICAS, Controllers
from policy.wire.controller_reports import EngineReport
from policy.wire.headers import SECRET_HEADER
from policy.wire.heartbeat import HEARTBEAT_PERIOD_S, Heartbeat, HeartbeatResponse
from serve.async_waiting import wait_at_most
from serve.engine.adapters.usage_accumulator import AdapterUsageAccumulator
from serve.engine.step_stats import merge
from serve.host.replica_host import ReplicaHost

# Replaces the network, for tests.
Transport = httpx.AsyncBaseTransport | None


async def send_heartbeats(hosts: Sequence[ReplicaHost], transport: Transport = None) -> None:
    """Send heartbeats of ``hosts`` until each has been sent once, or tried, with its replica stopped."""
    await asyncio.gather(*(_send_heartbeats(host, transport) for host in hosts))


async def _send_heartbeats(host: ReplicaHost, transport: Transport) -> None:
    """Usage is kept while the controller does not answer."""
    usage = AdapterUsageAccumulator()
    engine: EngineReport | None = None
    controllers = Controllers(host.spec.controller)
    async with httpx.AsyncClient(
        headers={SECRET_HEADER: host.spec.secret}, timeout=2.0, trust_env=False, transport=transport
    ) as client:
        while True:
            host.changed.clear()
            heartbeat = host.take_heartbeat()
            for use in heartbeat.uses:
                usage.add(use)
            engine = merge(engine, heartbeat.engine)
            heartbeat = msgspec.structs.replace(heartbeat, uses=usage.pending(), engine=engine)
            for address in controllers.in_turn():
                answer = await _send(client, address, heartbeat)
                if answer is not None:
                    controllers.answered(address)
                    usage.clear()
                    engine = None
                    # It may come from a controller that is stopping, or from another process on its port.
                    with contextlib.suppress(msgspec.MsgspecError):
                        host.obey(msgspec.json.decode(answer, type=HeartbeatResponse))
                    break
            if heartbeat.replica.state is ReplicaPhase.STOPPED:
                return
            await wait_at_most(host.changed, HEARTBEAT_PERIOD_S)


async def _send(client: httpx.AsyncClient, address: str, heartbeat: Heartbeat) -> bytes | None:
    """The answer of the controller at ``address``; ``None`` if there is none, or if it does not lead."""
    try:
        answer = await client.post(f"http://{address}{REPLICAS}", content=msgspec.json.encode(heartbeat))
    except httpx.HTTPError:
        return None
    return answer.content if answer.status_code == 200 else None
