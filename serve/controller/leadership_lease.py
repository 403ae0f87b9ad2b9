"""The election of this controller: it contends for the lease, and renews it while it leads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Protocol

from policy.errors import NotLeader, TidegateError
from policy.leader_election import LeaderElector, LeaderLease
from policy.wire.controller import LeaderStatus
from serve.async_waiting import run_in_thread

log = logging.getLogger("tidegate.controller")

# For a renewal that is under way, at an orderly end.
RELEASE_S = 5.0


class LeaseStore(Protocol):
    """Where the lease is kept. Every call blocks, and raises :class:`policy.errors.Unreachable`."""

    def read(self) -> LeaderLease | None:
        """The lease; ``None`` before there was any."""

    def replace(self, seen: LeaderLease | None, new: LeaderLease) -> bool:
        """Write ``new`` if the lease is still the one that was ``seen``; whether it was."""


class Leadership:
    """Contends for the lease in ``store`` for the controller at ``address``, for terms above ``above``.

    ``won`` is set once this process leads. A process that led does so once: it ends when it is deposed.
    """

    def __init__(
        self,
        store: LeaseStore,
        address: str,
        lease_s: float,
        above: int = 0,
        *,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._store = store
        self._address = address
        self._candidate = LeaderElector(f"{address} {secrets.token_hex(8)}", address, lease_s, above)
        self._wall = wall
        self._monotonic = monotonic
        self._trouble = ""
        # When the event loop ran last, and what ends the thread.
        self._alive_at = 0.0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.won = asyncio.Event()

    @property
    def term(self) -> int:
        """The term of the lease as it was seen last."""
        return self._candidate.term

    @property
    def lease_s(self) -> float:
        """The duration of a lease of this process."""
        return self._candidate.lease_s

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
        """Contend until cancelled; raises :class:`policy.errors.NotLeader` when this process is deposed.

        A thread does: what blocks the event loop for a moment costs no lease. An event loop that hangs does.
        """
        loop = asyncio.get_running_loop()
        self._alive_at = self._monotonic()
        self._thread = threading.Thread(target=self._contend, args=(loop,), name="lease", daemon=True)
        self._thread.start()
        try:
            while True:
                self._alive_at = self._monotonic()
                if self.won.is_set() and not self.leads():
                    why = f": {self._trouble}" if self._trouble else ""
                    raise NotLeader(f"the lease of term {self.term} was lost{why}")
                await asyncio.sleep(self._candidate.renew_s / 2)
        finally:
            self._ending.set()

    async def release(self) -> None:
        """Give the lease up, so that another controller leads at once; else it ends by itself."""
        self._ending.set()
        if self._thread is not None:
            await run_in_thread(lambda: self._join_and_release(RELEASE_S), "release")

    def _join_and_release(self, timeout_s: float) -> None:
        assert self._thread is not None
        self._thread.join(timeout_s)
        lease = None if self._thread.is_alive() else self._candidate.release(self._wall())
        if lease is not None:
            try:
                self._write(lease)
            except TidegateError as error:
                log.warning("the lease is not released: %s", error)

    def _contend(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._ending.is_set():
            if self._monotonic() < self._alive_at + self._candidate.lease_s:
                self._turn()
                if self.leads() and not self.won.is_set():
                    with contextlib.suppress(RuntimeError):  # the process ends
                        loop.call_soon_threadsafe(self.won.set)
            self._ending.wait(self._candidate.renew_s)

    def _turn(self) -> None:
        try:
            # A leader knows what is in the store, unless it was deposed.
            if not self.leads() or not self._propose():
                self._candidate.observe(self._store.read(), self._monotonic())
                self._propose()
        except TidegateError as error:
            if str(error) != self._trouble:
                log.warning("the lease: %s", error)
            self._trouble = str(error)
            return
        self._trouble = ""

    def _propose(self) -> bool:
        """Renew or take the lease, if it is time; whether it was written."""
        proposal = self._candidate.proposal(self._monotonic(), self._wall())
        return proposal is not None and self._write(proposal)

    def _write(self, lease: LeaderLease) -> bool:
        seen, sent_at = self._candidate.seen, self._monotonic()
        written = self._store.replace(seen, lease)
        if written:
            self._candidate.written(lease, sent_at, self._monotonic())
        return written
