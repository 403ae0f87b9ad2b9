"""A replica host tells the controller how it is and what it did, and does what it is answered.

At each change, and twice a second.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import httpx
import msgspec

from policy.wire.heartbeat import AdapterUse, Heartbeat, Orders
from policy.wire.reports import EngineReport
from serve.engine.step_stats import merge
from serve.host.host import ReplicaHost
from store.state_dir import SECRET_HEADER

BEAT_S = 0.5
# Versions whose uses are kept while the controller is away.
MAX_KEPT = 4096

Uses = dict[tuple[str, str], AdapterUse]


async def beat(host: ReplicaHost) -> None:
    """Send snapshots of ``host`` until cancelled; a controller that is away is tried again."""
    url = f"http://{host.spec.controller}/replicas"
    kept: Uses = {}
    engine: EngineReport | None = None
    async with httpx.AsyncClient(
        timeout=2.0, headers={SECRET_HEADER: host.spec.secret}, trust_env=False
    ) as client:
        while True:
            host.changed.clear()
            collect(kept, host.take_uses())
            engine = merge(engine, host.take_engine())
            said = Heartbeat(
                replica=host.snapshot(), uses=tuple(kept.values()), engine=engine, power=host.power
            )
            # What answers may be a controller that is just ending, or something else on its port.
            with contextlib.suppress(httpx.HTTPError, msgspec.MsgspecError):
                answer = await client.post(url, content=msgspec.json.encode(said))
                if answer.status_code == 200:
                    kept.clear()
                    engine = None
                    host.obey(msgspec.json.decode(answer.content, type=Orders))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await host.changed.wait()


async def beat_all(hosts: Sequence[ReplicaHost]) -> None:
    """Send snapshots of all of ``hosts`` until cancelled."""
    await asyncio.gather(*(beat(host) for host in hosts))


async def last_beats(hosts: Sequence[ReplicaHost]) -> None:
    """Tell the controller that all of ``hosts`` are gone, once."""
    await asyncio.gather(*(last_beat(host) for host in hosts))


async def last_beat(host: ReplicaHost) -> None:
    """Tell the controller that the host is gone, once."""
    url = f"http://{host.spec.controller}/replicas"
    headers = {SECRET_HEADER: host.spec.secret}
    said = Heartbeat(replica=host.snapshot(), uses=host.take_uses(), engine=host.take_engine())
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(timeout=1.0, headers=headers, trust_env=False) as client:
            await client.post(url, content=msgspec.json.encode(said))


def collect(kept: Uses, uses: tuple[AdapterUse, ...]) -> None:
    """Add ``uses`` to those that were not told yet, of which the newest :data:`MAX_KEPT` are kept."""
    for use in uses:
        key = (use.name, use.digest)
        before = kept.pop(key, None)
        kept[key] = use if before is None else _sum(before, use)
        if len(kept) > MAX_KEPT:
            del kept[next(iter(kept))]


def _sum(one: AdapterUse, other: AdapterUse) -> AdapterUse:
    return AdapterUse(
        name=one.name,
        digest=one.digest,
        requests=one.requests + other.requests,
        found=one.found + other.found,
        loads=one.loads + other.loads,
        load_s=one.load_s + other.load_s,
        # Only a load says whether the trouble of the one before is over.
        failed=other.failed if other.failed or other.loads else one.failed,
        busy_s=one.busy_s + other.busy_s,
        waiting=other.waiting,
    )
