"""A replica host tells the controller how it is: at each change, and twice a second."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import msgspec

from serve.host import ReplicaHost
from store.state import SECRET_HEADER

BEAT_S = 0.5


async def beat(host: ReplicaHost) -> None:
    """Send snapshots of ``host`` until cancelled; a controller that is away is tried again."""
    url = f"http://{host.spec.controller}/replicas"
    async with httpx.AsyncClient(
        timeout=2.0, headers={SECRET_HEADER: host.spec.secret}, trust_env=False
    ) as client:
        while True:
            host.changed.clear()
            with contextlib.suppress(httpx.HTTPError):
                await client.post(url, content=msgspec.json.encode(host.snapshot()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await host.changed.wait()


async def last_beat(host: ReplicaHost) -> None:
    """Tell the controller that the host is gone, once."""
    url = f"http://{host.spec.controller}/replicas"
    headers = {SECRET_HEADER: host.spec.secret}
    with contextlib.suppress(httpx.HTTPError):
        async with httpx.AsyncClient(timeout=1.0, headers=headers, trust_env=False) as client:
            await client.post(url, content=msgspec.json.encode(host.snapshot()))
