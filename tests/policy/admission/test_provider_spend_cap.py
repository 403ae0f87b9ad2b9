"""The spend cap: at most the cap in any hour, and unused reservations are returned."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.admission.provider_spend_cap import HOUR_S, SpendCap, SpendReservation, cost
from policy.config.deployment import ProviderPrice

CAP = 10.0
SLOT_S = HOUR_S / 60


def held(cap: SpendCap, amount: float, at: float) -> SpendReservation:
    hold = cap.hold(amount, at)
    assert hold is not None
    return hold


def test_a_price_is_for_a_million_tokens() -> None:
    assert cost(ProviderPrice(input=2.0, output=8.0), 500_000, 250_000) == 3.0


def test_reservations_count_and_unused_ones_are_returned() -> None:
    cap = SpendCap(CAP)
    first = held(cap, 6.0, 0.0)
    assert cap.hold(6.0, 1.0) is None
    cap.settle(first, 1.5, 2.0)
    assert (cap.held, cap.spent(2.0)) == (0.0, 1.5)
    second = held(cap, 8.5, 3.0)
    assert cap.hold(0.01, 3.0) is None
    cap.settle(second, 0.0, 4.0)
    cap.settle(second, 5.0, 4.0)  # a second time: no effect
    assert (cap.held, cap.spent(4.0)) == (0.0, 1.5)
    cap.cap = 1.0
    assert cap.hold(0.1, 5.0) is None, "a lower cap applies at once"


def test_spending_expires_after_an_hour() -> None:
    cap = SpendCap(CAP)
    cap.settle(held(cap, CAP, 30.0), CAP, 30.0)
    assert cap.hold(1.0, HOUR_S) is None
    assert cap.hold(1.0, HOUR_S + SLOT_S + 1) is not None
    assert cap.spent(50 * HOUR_S) == 0.0


class SpendCapLaws(RuleBasedStateMachine):
    """Requests that never use more than their reservations."""

    def __init__(self) -> None:
        super().__init__()
        self.cap = SpendCap(CAP)
        self.now = 0.0
        self.holds: list[SpendReservation] = []
        self.paid: list[tuple[float, float]] = []

    @rule(amount=st.floats(0, 6))
    def begin(self, amount: float) -> None:
        if (hold := self.cap.hold(amount, self.now)) is not None:
            self.holds.append(hold)

    @precondition(lambda self: self.holds)
    @rule(share=st.floats(0, 1), data=st.data())
    def end(self, share: float, data: st.DataObject) -> None:
        hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.cap.settle(hold, hold.amount * share, self.now)
        self.paid.append((self.now, hold.amount * share))

    @rule(elapsed=st.floats(0, HOUR_S))
    def time_passes(self, elapsed: float) -> None:
        self.now += elapsed

    @invariant()
    def no_hour_exceeds_the_cap(self) -> None:
        last_hour = sum(amount for at, amount in self.paid if at > self.now - HOUR_S)
        assert last_hour + sum(hold.amount for hold in self.holds) <= CAP + 1e-6

    @invariant()
    def held_is_the_sum_of_open_reservations(self) -> None:
        assert self.cap.held == pytest.approx(sum(hold.amount for hold in self.holds), abs=1e-6)


SpendCapLaws.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestSpendCapLaws = SpendCapLaws.TestCase
