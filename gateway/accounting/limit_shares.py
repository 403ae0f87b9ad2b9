"""Keeps this host's shares of the limits in use, where several hosts have one database.

Once a second, and at once when a limit is asked for the first time. A smaller share holds for the workers
before the database shows it, a larger one after.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import Connection

from gateway.intake.shared_limits import SharedLimits
from policy.errors import TidegateError
from policy.tenancy.lease_shares import LEAST_DEMAND, LimitLeaseHolder, decayed, next_share
from policy.tenancy.token_bucket import PERIOD_S
from store.database import Database
from store.tenancy import limit_leases
from store.tenancy.limit_leases import LimitLease

LOOK_EVERY_S = 0.25
RENEW_EVERY_S = 1.0
LEASE_S = 3.0
# Longer than a lease: a host that is not seen has none any more.
LIVES_S = 5.0


class LimitLeaseKeeper:
    """The leases of ``host``; ``limits`` is the accounting process's row, ``clock`` the monotonic clock.

    ``shares`` are those that were held at the last renewal, by the key of the tenant or key.
    """

    def __init__(
        self,
        database: Callable[[], Database],
        limits: SharedLimits,
        host: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._limits = limits
        self._host = host
        self._clock = clock
        self.shares: dict[int, float] = {}
        self._demands: dict[int, float] = {}
        self._asked: dict[int, int] = {}
        self._renewed_at = -RENEW_EVERY_S
        self._joined_at: float | None = None
        self._alone = True

    def turn(self) -> None:
        """Renew the leases if it is time; raises :class:`policy.errors.Unreachable`."""
        self._limits.beat()
        now = self._clock()
        database = self._database()
        if not database.is_shared:
            self._limits.publish_hosts(1, now + LEASE_S)
            return
        asked = {} if self._alone else self._in_use(now)
        if now - self._renewed_at >= RENEW_EVERY_S or not asked.keys() <= self.shares.keys():
            self._renew(database, now)

    def close(self) -> None:
        """Give all shares back, if the database answers."""
        try:
            database = self._database()
            if database.is_shared:
                with database.writing() as connection:
                    limit_leases.leave(connection, self._host)
        except TidegateError:  # they end by themselves
            pass
        self._limits.close()

    def _in_use(self, now: float) -> dict[int, int]:
        """How often the keys and tenants were asked for that requests named in the last minute."""
        return {key: asked for key, (asked, at) in self._limits.asked().items() if at > now - PERIOD_S}

    def _renew(self, database: Database, now: float) -> None:
        with database.writing() as connection:
            at = limit_leases.now(connection)
            hosts = limit_leases.meet(connection, self._host, at, lives_s=LIVES_S)
            if self._joined_at is None:
                self._joined_at = now
                # What another accounting process of this host held, which was killed, holds on until it ends.
                self._alone = len(hosts) == 1
            shares: dict[int, float] = {}
            full: set[int] = set()
            if len(hosts) > 1:
                shares, full = self._shared(connection, at, now)
            limit_leases.forget(connection, at - PERIOD_S)
        until = now + LEASE_S
        for key, share in shares.items():
            self._limits.publish_lease(key, share, until, full=key in full)
        self._limits.publish_hosts(len(hosts), until)
        self.shares, self._alone = shares, len(hosts) == 1
        self._renewed_at = now

    def _shared(self, connection: Connection, at: float, now: float) -> tuple[dict[int, float], set[int]]:
        """The shares from now on, and those that begin with full buckets: of limits that no host used."""
        until, in_use = now + LEASE_S, self._in_use(now)
        # It had all of them, and no other host took any meanwhile.
        owned = self._alone and now - self._renewed_at < LEASE_S
        self._count(in_use, now)
        held = limit_leases.read(connection, [limit_id(key) for key in in_use], at - PERIOD_S)
        shares: dict[int, float] = {}
        full: set[int] = set()
        written: dict[str, LimitLease] = {}
        for key in in_use:
            known = held[limit_id(key)]
            others = [lease for lease in known if lease.host != self._host]
            mine = 1.0 if owned else self._share(known, at)
            share = mine
            if not self._is_joining(now):
                share = next_share(
                    LimitLeaseHolder(mine, self._demands[key]),
                    [LimitLeaseHolder(lease.share, lease.demand) for lease in others if lease.expires > at],
                )
                if not mine and share and not others:
                    full.add(key)
            if share < mine or owned:
                self._limits.publish_lease(key, share, until, full=False)
            shares[key] = share
            written[limit_id(key)] = LimitLease(self._host, share, self._demands[key], at + LEASE_S)
        limit_leases.hold(connection, written)
        return shares, full

    def _share(self, known: list[LimitLease], at: float) -> float:
        """What this host holds by the database, which a former process of it may have taken."""
        return sum(lease.share for lease in known if lease.host == self._host and lease.expires > at)

    def _is_joining(self, now: float) -> bool:
        """Whether a host that had all limits alone may not know of this one yet."""
        return not self._alone and self._joined_at is not None and now - self._joined_at < LEASE_S

    def _count(self, in_use: dict[int, int], now: float) -> None:
        """Follow the demand for each of the limits in use."""
        elapsed_s = max(now - self._renewed_at, LOOK_EVERY_S)
        self._demands = {
            key: max(
                decayed(self._demands.get(key, 0.0), asked - self._asked.get(key, asked - 1), elapsed_s),
                LEAST_DEMAND,
            )
            for key, asked in in_use.items()
        }
        self._asked = in_use


def limit_id(key: int) -> str:
    """What a tenant's or key's limits are called in the database."""
    return f"{key:016x}"
