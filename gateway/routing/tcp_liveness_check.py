"""Whether a replica is alive after a connection to it was lost: by new TCP connections."""

from __future__ import annotations

import asyncio
from typing import Final

from gateway.http.http1_client import ConnectionPool, is_local_fault

# The port of a process that is being killed may be open for so long after its connections.
DYING_S: Final = 0.05


class TcpLivenessCheck:
    """Connects to one replica; a check that runs is for all that ask meanwhile."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._running: asyncio.Task[bool] | None = None

    async def is_alive(self) -> bool:
        """Whether the replica accepts connections, of which it keeps new ones.

        So it is assumed where this machine can open none: its own lack says nothing of the replica.
        """
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._check())
        return await asyncio.shield(self._running)

    async def _check(self) -> bool:
        this = self._running
        try:
            self._pool.give(await self._pool.connect())
            await asyncio.sleep(DYING_S)
            self._end(this)  # from now on it says nothing of a death
            self._pool.give(await self._pool.connect())
        except OSError as error:
            return is_local_fault(error)
        finally:
            self._end(this)
        return True

    def _end(self, this: asyncio.Task[bool] | None) -> None:
        if self._running is this:
            self._running = None
