"""The election of the controller that leads, by a lease: a pure state machine.

A store keeps one :class:`LeaderLease` and replaces it only where it is still the one that a candidate read
(compare and swap). The leader renews it. A candidate takes it over after it has seen no renewal for the
lease's duration, by its own monotonic clock: instants of different machines are never compared. The leader
gives up before that, after :data:`HELD` of the duration since it *sent* its last renewal, so that clocks may
run at rates that differ by a quarter.

Clocks alone do not protect from a leader that is paused between this check and its order. Each takeover
therefore begins a new term, and every receiver of an order (hosts, gateways, actuators, the store of the
state) refuses one of a lower term than it has seen: a fencing token, as in M. Burrows, "The Chubby lock
service" (OSDI 2006), section 2.4.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

# The part of the duration of its lease for which a leader leads after a renewal.
HELD = 2 / 3
# The parts of the duration after which a leader renews, and a candidate looks again.
RENEW = 1 / 5


class LeaderLease(msgspec.Struct, frozen=True, kw_only=True):
    """The leadership of ``holder``, at ``address``, in ``term``: until it is not renewed for ``lease_s``.

    ``holder`` is unique to a process. ``renewals`` counts, so that each renewal is another value. A lease
    that was ``released`` may be taken at once. ``acquired_at`` and ``renewed_at`` are Unix seconds.
    """

    holder: str
    address: str
    term: int
    lease_s: float
    renewals: int = 0
    released: bool = False
    acquired_at: float = 0.0
    renewed_at: float = 0.0


class LeaderElector:
    """What one process knows of the election. ``now`` is its monotonic clock, ``at`` its wall clock.

    Read the store and :meth:`observe`; write :meth:`proposal`, if there is one, in place of :attr:`seen`;
    report a write that succeeded by :meth:`written`. One that failed, or whose outcome is not known, changes
    nothing: the next read shows what came of it.
    """

    def __init__(self, holder: str, address: str, lease_s: float, above: int = 0) -> None:
        """Its terms are above ``above``: those of a store before this one."""
        self._holder = holder
        self._address = address
        self.lease_s = lease_s
        # With the highest one that was seen: a lease that is deleted begins no term again.
        self._above = above
        # The lease in the store, and when it was first seen so.
        self.seen: LeaderLease | None = None
        self._seen_at = 0.0
        # When the last renewal that succeeded was sent.
        self._held_from: float | None = None

    @property
    def term(self) -> int:
        """The term of the lease as it was seen last, 0 before there is any."""
        return self.seen.term if self.seen is not None else 0

    @property
    def renew_s(self) -> float:
        """How often the store is to be read."""
        return self.lease_s * RENEW

    def leads(self, now: float) -> bool:
        """Whether this process may give orders."""
        return self._held_from is not None and now < self._held_from + self.lease_s * HELD

    def age_s(self, now: float) -> float | None:
        """For how long the lease has been seen unchanged."""
        return now - self._seen_at if self.seen is not None else None

    def observe(self, lease: LeaderLease | None, now: float) -> None:
        """The store's content, which was read before ``now``."""
        if lease != self.seen:
            self.seen, self._seen_at = lease, now
            self._above = max(self._above, self.term)
        if lease is None or lease.holder != self._holder or lease.released:
            self._held_from = None

    def proposal(self, now: float, at: float) -> LeaderLease | None:
        """The lease to write in place of :attr:`seen`; ``None`` while another process has it."""
        seen = self.seen
        if seen is not None and seen.holder == self._holder and not seen.released:
            return replace(seen, renewals=seen.renewals + 1, renewed_at=at)
        if seen is not None and not seen.released and now - self._seen_at <= seen.lease_s:
            return None
        return LeaderLease(
            holder=self._holder, address=self._address, term=self._above + 1, lease_s=self.lease_s,
            acquired_at=at, renewed_at=at,
        )  # fmt: skip

    def release(self, at: float) -> LeaderLease | None:
        """The lease to write at an orderly end, so that another process leads at once; it leads no more."""
        self._held_from = None
        if self.seen is None or self.seen.holder != self._holder or self.seen.released:
            return None
        return replace(self.seen, released=True, renewals=self.seen.renewals + 1, renewed_at=at)

    def written(self, lease: LeaderLease, sent_at: float, now: float) -> None:
        """``lease`` was written; the write began at ``sent_at`` and its answer came at ``now``."""
        self.seen, self._seen_at = lease, now
        self._above = max(self._above, lease.term)
        self._held_from = None if lease.released else sent_at
