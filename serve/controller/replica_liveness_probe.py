"""Asks replicas whose heartbeats stopped at their own port, so that a dead host leaves the fleet.

A host that stays silent hangs: its process is stopped, or blocked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import httpx

from policy.types import Replica
from policy.wire.headers import SECRET_HEADER
from serve.state.replica_registry import ReplicaRegistry

log = logging.getLogger("tidegate.controller")

PERIOD_S = 0.2
TIMEOUT_S = 1.0
# A round that takes longer was interrupted: this process was stopped or blocked, and received no heartbeats.
STALLED_S = PERIOD_S + 2 * TIMEOUT_S


async def probe_silent(
    registry: ReplicaRegistry,
    secret: str,
    lost: Callable[[Replica], None],
    hung: Callable[[Replica], Awaitable[None]],
    monotonic: Callable[[], float],
) -> None:
    """Probe until cancelled; a port that refuses ends a replica's membership at once.

    ``lost`` is called for each replica that leaves the fleet so, ``hung`` once its host should be replaced.
    """
    async with httpx.AsyncClient(
        timeout=TIMEOUT_S, headers={SECRET_HEADER: secret}, trust_env=False
    ) as client:
        before = monotonic()
        while True:
            await asyncio.sleep(PERIOD_S)
            now = monotonic()
            if now - before > STALLED_S:
                registry.not_heard_until(now)
            before = now
            try:
                await _probe_once(client, registry, lost, hung, now)
            except Exception:
                # Without probes dead replicas would stay in the fleet.
                log.exception("probing silent replicas")


async def _probe_once(
    client: httpx.AsyncClient,
    registry: ReplicaRegistry,
    lost: Callable[[Replica], None],
    hung: Callable[[Replica], Awaitable[None]],
    now: float,
) -> None:
    silent = registry.silent(now)
    answers = await asyncio.gather(*(_refuses(client, replica) for replica in silent))
    for replica, refused in zip(silent, answers, strict=True):
        if registry.give_up(replica, now, refused=refused):
            lost(replica)
    for replica in registry.take_hung(now):
        await hung(replica)


async def _refuses(client: httpx.AsyncClient, replica: Replica) -> bool:
    if replica.url:
        try:
            await client.get(f"{replica.url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return isinstance(error, httpx.ConnectError)
    return False
