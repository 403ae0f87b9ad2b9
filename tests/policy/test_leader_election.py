"""The election: one leader at a time, whatever the clocks, the store and the scheduler do."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from policy.leader_election import LeaderElector, LeaderLease

LEASE_S = 10.0


class Store:
    """A register with compare and swap."""

    def __init__(self) -> None:
        self.lease: LeaderLease | None = None

    def replace(self, seen: LeaderLease | None, new: LeaderLease) -> bool:
        if self.lease != seen:
            return False
        self.lease = new
        return True


class World:
    """Candidates with clocks of their own, one store, and one resource that refuses lower terms."""

    def __init__(self, random: Random, candidates: int) -> None:
        self.random = random
        self.now = 0.0
        self.faults = True
        self.store = Store()
        self.accepted: list[tuple[int, int]] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.clocks = [(random.uniform(-1e6, 1e6), random.uniform(0.9, 1.1)) for _ in range(candidates)]
        self.candidates = [LeaderElector(f"c{i}", f"a{i}", LEASE_S) for i in range(candidates)]
        for i in range(candidates):
            self.later(random.uniform(0, 2), lambda i=i: self.turn(i))

    def clock(self, i: int) -> float:
        offset, rate = self.clocks[i]
        return offset + rate * self.now

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), what))

    def delay_s(self) -> float:
        """Mostly short; now and then the network or the process stands still for longer than a lease."""
        long = self.faults and self.random.random() < 0.15
        return self.random.uniform(0, 3 * LEASE_S) if long else self.random.uniform(0, 0.1)

    def is_lost(self) -> bool:
        return self.faults and self.random.random() < 0.15

    def turn(self, i: int) -> None:
        """A read that arrives late or never, then what follows from it."""
        me = self.candidates[i]
        if me.leads(self.clock(i)):
            # The process may be paused between this check and its order.
            self.later(self.delay_s(), lambda term=me.term: self.order(i, term))
        paused_s = self.random.uniform(0, 3 * LEASE_S) if self.is_lost() else 0.0
        self.later(me.renew_s + paused_s, lambda: self.turn(i))
        if not self.is_lost():
            read = self.store.lease
            self.later(self.delay_s(), lambda: self.write(i, read))

    def write(self, i: int, read: LeaderLease | None) -> None:
        me = self.candidates[i]
        me.observe(read, self.clock(i))
        proposal = me.proposal(self.clock(i), at=0.0)
        if proposal is None or self.is_lost():
            return
        seen, sent_at = me.seen, self.clock(i)

        def apply() -> None:
            if self.store.replace(seen, proposal) and not self.is_lost():
                self.later(self.delay_s(), lambda: me.written(proposal, sent_at, self.clock(i)))

        self.later(self.delay_s(), apply)

    def order(self, i: int, term: int) -> None:
        if not self.accepted or term >= self.accepted[-1][0]:
            self.accepted.append((term, i))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
            assert sum(each.leads(self.clock(i)) for i, each in enumerate(self.candidates)) <= 1
        self.now = until


@pytest.mark.slow
@given(st.integers(0, 2**32), st.integers(2, 4))
def test_one_leads_at_a_time_and_each_term_has_one_holder(seed: int, candidates: int) -> None:
    world = World(Random(seed), candidates)  # noqa: S311 - no secret
    world.run(15 * LEASE_S)
    holders = dict(world.accepted)
    assert all(holders[term] == i for term, i in world.accepted)
    # Once the faults end, somebody leads: late messages are gone after three leases.
    world.faults = False
    world.run(21 * LEASE_S)
    assert sum(each.leads(world.clock(i)) for i, each in enumerate(world.candidates)) == 1


def elected(now: float = 0.0) -> tuple[LeaderElector, LeaderLease]:
    leader = LeaderElector("one", "a:1", LEASE_S)
    leader.observe(None, now)
    lease = leader.proposal(now, at=0.0)
    assert lease is not None
    leader.written(lease, now, now)
    return leader, lease


def test_a_leader_gives_up_before_another_may_lead() -> None:
    leader, lease = elected()
    other = LeaderElector("two", "a:2", LEASE_S)
    other.observe(lease, 0.0)
    assert leader.leads(LEASE_S * 0.66) and not leader.leads(LEASE_S * 0.67)
    assert other.proposal(LEASE_S, at=0.0) is None
    taken = other.proposal(LEASE_S + 0.1, at=5.0)
    assert taken == LeaderLease(
        holder="two", address="a:2", term=2, lease_s=LEASE_S, acquired_at=5.0, renewed_at=5.0
    )
    leader.observe(taken, LEASE_S)
    assert leader.proposal(LEASE_S, at=0.0) is None and leader.term == 2


def test_a_renewal_whose_outcome_is_unknown_gives_no_time_but_a_read_shows_it() -> None:
    leader, lease = elected()
    unknown = leader.proposal(5.0, at=0.0)
    assert unknown is not None and unknown.renewals == 1
    leader.observe(unknown, 6.0)
    assert not leader.leads(7.0)
    again = leader.proposal(7.0, at=0.0)
    assert again == replace(lease, renewals=2)
    leader.written(again, 7.0, 7.5)
    assert leader.leads(13.0)


def test_a_lease_that_is_deleted_begins_no_term_again() -> None:
    leader, lease = elected()
    stand_by = LeaderElector("two", "a:2", LEASE_S)
    stand_by.observe(lease, 0.0)
    for each in (stand_by, leader):
        each.observe(None, 1.0)
        assert each.term == 0 and not each.leads(1.0)
        taken = each.proposal(1.0, at=0.0)
        assert taken is not None and taken.term == lease.term + 1


def test_a_lease_that_is_released_is_taken_at_once() -> None:
    leader, _ = elected()
    released = leader.release(at=3.0)
    assert released is not None and not leader.leads(0.0) and leader.age_s(2.0) == 2.0
    other = LeaderElector("two", "a:2", LEASE_S)
    other.observe(released, 0.0)
    taken = other.proposal(0.0, at=0.0)
    assert taken is not None and (taken.term, taken.holder) == (2, "two")
    # The process that released it is a candidate like any other.
    leader.written(released, 0.0, 0.0)
    assert leader.release(at=3.0) is None
    again = leader.proposal(0.0, at=0.0)
    assert again is not None and again.term == 2
