"""Asks replicas whose heartbeats stopped at their own port, so that a dead host leaves the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from policy.types import Replica
from policy.wire.headers import SECRET_HEADER
from serve.state.replica_registry import ReplicaRegistry

PERIOD_S = 0.2


async def probe_silent(
    registry: ReplicaRegistry, secret: str, lost: Callable[[Replica], None], monotonic: Callable[[], float]
) -> None:
    """Probe until cancelled; a port that refuses ends a replica's membership at once."""
    async with httpx.AsyncClient(timeout=1.0, headers={SECRET_HEADER: secret}, trust_env=False) as client:
        while True:
            await asyncio.sleep(PERIOD_S)
            silent = registry.silent(monotonic())
            answers = await asyncio.gather(*(_refuses(client, replica) for replica in silent))
            for replica, refused in zip(silent, answers, strict=True):
                if registry.give_up(replica, monotonic(), refused=refused):
                    lost(replica)


async def _refuses(client: httpx.AsyncClient, replica: Replica) -> bool:
    if replica.url:
        try:
            await client.get(f"{replica.url}/v1/models")
        except httpx.HTTPError as error:
            return isinstance(error, httpx.ConnectError)
    return False
