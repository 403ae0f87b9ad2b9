"""The election of this controller: it contends for the lease, and renews it while it leads."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import Protocol

from policy.errors import NotLeader, TidegateError
from policy.leader_election import Candidate, Lease
from policy.wire.controller import LeaderStatus
from serve.async_waiting import run_in_thread

log = logging.getLogger("tidegate.controller")


class LeaseStore(Protocol):
    """Where the lease is kept. Every call blocks, and raises :class:`policy.errors.Unreachable`."""

    def read(self) -> Lease | None:
        """The lease; ``None`` before there was any."""

    def replace(self, seen: Lease | None, new: Lease) -> bool:
        """Write ``new`` if the lease is still the one that was ``seen``; whether it was."""

    def close(self) -> None:
        """Close connections."""


class Leadership:
    """Contends for the lease in ``store`` for the controller at ``address``.

    ``won`` is set once this process leads. A process that led does so once: it ends when it is deposed.
    """

    def __init__(
        self,
        store: LeaseStore,
        address: str,
        lease_s: float,
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._address = address
        self._candidate = Candidate(f"{address} {secrets.token_hex(8)}", address, lease_s)
        self._wall = wall
        self._monotonic = monotonic
        self._trouble = ""
        self.won = asyncio.Event()

    @property
    def term(self) -> int:
        """The term of the lease as it was seen last."""
        return self._candidate.term

    def leads(self) -> bool:
        """Whether this process may give orders now."""
        return self._candidate.leads(self._monotonic())

    def status(self) -> LeaderStatus:
        lease, leads = self._candidate.seen, self.leads()
        held = lease is not None and not lease.released
        return LeaderStatus(
            address=self._address,
            leads=leads,
            leader=lease.address if lease is not None and held else "",
            term=self.term,
            lease_s=lease.lease_s if lease is not None else 0.0,
            renewed_s=self._candidate.age_s(self._monotonic()) if held else None,
            trouble=self._trouble,
        )

    async def run(self) -> None:
        """Contend until cancelled; raises :class:`policy.errors.NotLeader` when this process is deposed."""
        while True:
            turn = asyncio.create_task(self._turn())
            # A store that does not answer does not keep a leader from noticing that its lease has ended.
            while not turn.done():
                await asyncio.wait({turn}, timeout=self._candidate.renew_s)
                self._check()
            turn.result()
            self._check()
            await asyncio.sleep(self._candidate.renew_s)

    async def release(self) -> None:
        """Give the lease up, so that another controller leads at once; else it ends by itself."""
        if (lease := self._candidate.release(self._wall())) is not None:
            try:
                await self._write(lease)
            except TidegateError as error:
                log.warning("the lease is not released: %s", error)

    def _check(self) -> None:
        if self.won.is_set() and not self.leads():
            raise NotLeader(f"the lease of term {self.term} was lost" + self._why())

    def _why(self) -> str:
        return f": {self._trouble}" if self._trouble else ""

    async def _turn(self) -> None:
        try:
            # A leader knows what is in the store, unless it was deposed.
            if not self.leads() or not await self._propose():
                lease = await run_in_thread(self._store.read, "lease")
                self._candidate.observe(lease, self._monotonic())
                await self._propose()
        except TidegateError as error:
            if str(error) != self._trouble:
                log.warning("the lease: %s", error)
            self._trouble = str(error)
            return
        self._trouble = ""
        if self.leads():
            self.won.set()

    async def _propose(self) -> bool:
        """Renew or take the lease, if it is time; whether it was written."""
        proposal = self._candidate.proposal(self._monotonic(), self._wall())
        return proposal is not None and await self._write(proposal)

    async def _write(self, lease: Lease) -> bool:
        seen, sent_at = self._candidate.seen, self._monotonic()
        written = await run_in_thread(lambda: self._store.replace(seen, lease), "lease")
        if written:
            self._candidate.written(lease, sent_at, self._monotonic())
        return written
