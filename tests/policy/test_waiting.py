"""The laws of the queue: order of arrival, old places, deadlines, nothing lost and nothing twice."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.waiting import Waiting


def test_who_returns_stands_before_who_came_later() -> None:
    queue: Waiting[str] = Waiting()
    first, second, third = queue.ticket(), queue.ticket(), queue.ticket()
    queue.put(second, "second", 10.0)
    queue.put(third, "third", 10.0)
    queue.put(first, "first", 10.0)
    assert [entry for _, entry in queue.in_order()] == ["first", "second", "third"]


def test_a_ticket_waits_once() -> None:
    queue: Waiting[str] = Waiting()
    ticket = queue.ticket()
    queue.put(ticket, "a", 1.0)
    with pytest.raises(ValueError, match="already waits"):
        queue.put(ticket, "b", 1.0)


def test_deadlines_end_the_wait_earliest_first() -> None:
    queue: Waiting[str] = Waiting()
    for name, deadline in (("late", 3.0), ("early", 1.0), ("middle", 2.0)):
        queue.put(queue.ticket(), name, deadline)
    assert queue.next_deadline() == 1.0
    assert queue.expire(2.0) == ["early", "middle"]
    assert queue.next_deadline() == 3.0
    assert len(queue) == 1


class Laws(RuleBasedStateMachine):
    """Against a plain dictionary of what should wait."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: Waiting[int] = Waiting()
        self.model: dict[int, float] = {}
        self.away: list[int] = []
        self.at = 0.0

    @rule(wait=st.floats(0.0, 10.0))
    def arrive(self, wait: float) -> None:
        ticket = self.queue.ticket()
        self.queue.put(ticket, ticket, self.at + wait)
        self.model[ticket] = self.at + wait

    @precondition(lambda self: self.model)
    @rule(data=st.data(), comes_back=st.booleans())
    def leave(self, data: st.DataObject, comes_back: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.model)))
        assert self.queue.remove(ticket)
        assert not self.queue.remove(ticket)
        del self.model[ticket]
        if comes_back:
            self.away.append(ticket)

    @precondition(lambda self: self.away)
    @rule(wait=st.floats(0.0, 10.0))
    def return_to_the_old_place(self, wait: float) -> None:
        ticket = self.away.pop()
        self.queue.put(ticket, ticket, self.at + wait)
        self.model[ticket] = self.at + wait

    @rule(limit=st.integers(0, 3))
    def take_some(self, limit: int) -> None:
        for taken, (ticket, _) in enumerate(self.queue.in_order()):
            if taken >= limit:
                break
            assert self.queue.remove(ticket)
            assert ticket == min(self.model)
            del self.model[ticket]

    @rule(later=st.floats(0.0, 5.0))
    def time_passes(self, later: float) -> None:
        self.at += later
        expired = self.queue.expire(self.at)
        due = {t: deadline for t, deadline in self.model.items() if deadline <= self.at}
        assert sorted(expired) == sorted(due)
        assert [due[ticket] for ticket in expired] == sorted(due.values())
        for ticket in expired:
            del self.model[ticket]

    @invariant()
    def same_entries_in_order(self) -> None:
        assert [ticket for ticket, _ in self.queue.in_order()] == sorted(self.model)
        assert len(self.queue) == len(self.model)
        assert self.queue.next_deadline() == min(self.model.values(), default=None)


TestLaws = Laws.TestCase
