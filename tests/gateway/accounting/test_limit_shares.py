"""Hosts with one database share limits: together they admit no more than is documented."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gateway.accounting.limit_shares import LOOK_EVERY_S, LimitLeaseKeeper
from gateway.intake.principal import Principal, WorkerTenant
from gateway.intake.rate_limiter import RateLimiter
from gateway.intake.shared_limits import ACCOUNTING, SharedLimits
from gateway.protocol.errors import Refused
from policy.config.tenancy import AccessPolicy
from policy.errors import Unreachable
from store.database import Database
from store.tenancy import limit_leases
from tests.clock import Clock

pytestmark = pytest.mark.slow

LIMIT = 600
WHO = Principal(WorkerTenant("web", b""), "key-1", (AccessPolicy(), AccessPolicy(rpm_limit=LIMIT)))


class Host:
    def __init__(self, root: Path, name: str, database: Database, clock: Clock) -> None:
        self.limiter = RateLimiter(SharedLimits(root / name, 0, clock), clock)
        self._database = database
        self.reachable = True
        limits = SharedLimits(root / name, ACCOUNTING, clock)
        self.keeper = LimitLeaseKeeper(self._get, limits, name, clock)

    def _get(self) -> Database:
        if not self.reachable:
            raise Unreachable("the database does not answer")
        return self._database

    def turn(self) -> None:
        try:
            self.keeper.turn()
        except Unreachable:
            assert not self.reachable
        self.limiter.beat()

    def burst(self, count: int) -> int:
        admitted = 0
        for _ in range(count):
            try:
                self.limiter.admit(WHO, 1, 0).settle(1, 0, began=True)
            except Refused:
                continue
            admitted += 1
        return admitted


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


Start = Callable[[str], Host]


@pytest.fixture
def start(
    tmp_path: Path, database_url: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    monkeypatch.setattr(Database, "is_shared", True)
    monkeypatch.setattr(limit_leases, "now", lambda connection: 1e9 + clock.now)
    database = Database(database_url)
    yield lambda name: Host(tmp_path, name, database, clock)
    database.close()


def run(hosts: list[Host], clock: Clock, seconds: float, asks: list[int]) -> list[int]:
    """What hosts admit that are asked so often every quarter of a second."""
    admitted = [0] * len(hosts)
    for _ in range(int(seconds / LOOK_EVERY_S)):
        for i, host in enumerate(hosts):
            host.turn()
            admitted[i] += host.burst(asks[i])
        clock.now += LOOK_EVERY_S
    return admitted


def test_a_host_alone_has_all_of_a_limit_and_no_leases(start: Start) -> None:
    host = start("a")
    host.turn()
    assert host.burst(2 * LIMIT) == LIMIT
    host.turn()
    assert host.keeper.shares == {}


def test_hosts_under_a_burst_admit_the_limit_and_a_request_each(start: Start, clock: Clock) -> None:
    hosts = [start("a"), start("b")]
    run(hosts, clock, 5.0, [0, 0])
    admitted = run(hosts, clock, 60.0, [12, 12])
    # A full bucket, of which the half that one host gives is lost, and its refill; without a lease each host
    # admits one request.
    assert 1.5 * LIMIT <= sum(admitted) <= 2 * LIMIT + len(hosts)
    late = run(hosts, clock, 60.0, [12, 12])
    assert sum(late) == pytest.approx(LIMIT, rel=0.02)
    assert late[0] == pytest.approx(late[1], rel=0.1)


def test_a_host_that_joins_takes_what_the_other_gives(start: Start, clock: Clock) -> None:
    first = start("a")
    before = run([first], clock, 5.0, [12])
    second = start("b")
    after = run([first, second], clock, 60.0, [12, 12])
    assert before[0] + sum(after) <= LIMIT + LIMIT / 60 * 65 + 2
    assert after[1] > 0.3 * LIMIT


def test_the_shares_of_a_host_that_ends_or_is_killed_go_to_the_others(start: Start, clock: Clock) -> None:
    hosts = [start("a"), start("b"), start("c")]
    run(hosts, clock, 5.0, [0, 0, 0])
    run(hosts, clock, 20.0, [12, 12, 12])
    hosts.pop().keeper.close()
    run(hosts, clock, 10.0, [12, 12])
    assert sum(run(hosts, clock, 30.0, [12, 12])) == pytest.approx(LIMIT / 2, rel=0.03)
    hosts.pop()
    run(hosts, clock, 10.0, [12])
    assert run(hosts, clock, 30.0, [12])[0] == pytest.approx(LIMIT / 2, rel=0.03)


def test_an_unused_share_goes_to_who_asks(start: Start, clock: Clock) -> None:
    hosts = [start("a"), start("b")]
    run(hosts, clock, 5.0, [0, 0])
    run(hosts, clock, 20.0, [12, 12])
    run(hosts, clock, 65.0, [12, 0])
    assert run(hosts, clock, 30.0, [12, 0])[0] == pytest.approx(LIMIT / 2, rel=0.02)


def test_without_the_database_each_host_goes_on_with_an_equal_part(start: Start, clock: Clock) -> None:
    hosts = [start("a"), start("b")]
    run(hosts, clock, 5.0, [0, 0])
    run(hosts, clock, 20.0, [12, 3])
    for host in hosts:
        host.reachable = False
    run(hosts, clock, 10.0, [12, 12])
    assert run(hosts, clock, 60.0, [12, 12]) == [pytest.approx(LIMIT / 2, rel=0.05)] * 2
    # One that alone is cut off keeps its part, and the other has the whole limit.
    hosts[0].reachable = True
    run(hosts, clock, 10.0, [12, 12])
    assert 1.4 * LIMIT < sum(run(hosts, clock, 60.0, [12, 12])) <= 1.5 * LIMIT + 2
