"""In no hour is more spent than the cap, and what was held and not used comes back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.admission.spend_cap import HOUR_S, Reservation, SpendCap, cost
from policy.config.deployment import Price

CAP = 10.0
SLOT_S = HOUR_S / 60


def held(purse: SpendCap, amount: float, at: float) -> Reservation:
    hold = purse.hold(amount, at)
    assert hold is not None
    return hold


def test_a_price_is_for_a_million_tokens() -> None:
    assert cost(Price(input=2.0, output=8.0), 500_000, 250_000) == 3.0


def test_what_is_held_counts_and_what_was_not_used_comes_back() -> None:
    purse = SpendCap(CAP)
    first = held(purse, 6.0, 0.0)
    assert purse.hold(6.0, 1.0) is None
    purse.settle(first, 1.5, 2.0)
    assert (purse.held, purse.spent(2.0)) == (0.0, 1.5)
    second = held(purse, 8.5, 3.0)
    assert purse.hold(0.01, 3.0) is None
    purse.settle(second, 0.0, 4.0)
    assert purse.spent(4.0) == 1.5


def test_settling_again_changes_nothing() -> None:
    purse = SpendCap(CAP)
    hold = held(purse, 5.0, 0.0)
    purse.settle(hold, 4.0, 0.0)
    purse.settle(hold, 5.0, 0.0)
    assert (purse.held, purse.spent(0.0)) == (0.0, 4.0)


def test_money_comes_back_after_an_hour() -> None:
    purse = SpendCap(CAP)
    purse.settle(held(purse, CAP, 30.0), CAP, 30.0)
    assert purse.hold(1.0, HOUR_S) is None
    assert purse.hold(1.0, HOUR_S + SLOT_S + 1) is not None


def test_a_long_silence_empties_the_hour() -> None:
    purse = SpendCap(CAP)
    purse.settle(held(purse, CAP, 0.0), CAP, 0.0)
    assert purse.spent(50 * HOUR_S) == 0.0


def test_another_cap_holds_from_now_on() -> None:
    purse = SpendCap(CAP)
    purse.settle(held(purse, 4.0, 0.0), 4.0, 0.0)
    purse.cap = 2.0
    assert purse.hold(0.1, 1.0) is None


def test_a_cap_of_nothing_spends_nothing() -> None:
    assert SpendCap(0.0).hold(1e-9, 0.0) is None


class PurseLaws(RuleBasedStateMachine):
    """Requests that never use more than was held for them."""

    def __init__(self) -> None:
        super().__init__()
        self.purse = SpendCap(CAP)
        self.now = 0.0
        self.holds: list[Reservation] = []
        self.paid: list[tuple[float, float]] = []

    @rule(amount=st.floats(0, 6))
    def begin(self, amount: float) -> None:
        if (hold := self.purse.hold(amount, self.now)) is not None:
            self.holds.append(hold)

    @precondition(lambda self: self.holds)
    @rule(share=st.floats(0, 1), data=st.data())
    def end(self, share: float, data: st.DataObject) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.purse.settle(hold, hold.amount * share, self.now)
        self.paid.append((self.now, hold.amount * share))

    @rule(elapsed=st.floats(0, HOUR_S))
    def time_passes(self, elapsed: float) -> None:
        self.now += elapsed

    @invariant()
    def no_hour_passes_the_cap(self) -> None:
        last_hour = sum(amount for at, amount in self.paid if at > self.now - HOUR_S)
        assert last_hour + sum(hold.amount for hold in self.holds) <= CAP + 1e-6

    @invariant()
    def what_is_held_is_what_was_not_settled(self) -> None:
        assert self.purse.held == pytest.approx(sum(hold.amount for hold in self.holds), abs=1e-6)


PurseLaws.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestPurseLaws = PurseLaws.TestCase
