"""Who is alone never waits, nobody waits past the window, and no input is lost or sent twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.admission.input_batching import Batch, Windows, apportion

WINDOW_S = 0.002
MOST = 8


class CoalescingLaws(RuleBasedStateMachine):
    """Members come, leave and return in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: Windows[int] = Windows()
        self.now = 0.0
        self.count = 0
        self.waiting: dict[int, tuple[str, int, float]] = {}
        self.under_way: list[Batch[int]] = []

    def left(self, batches: list[Batch[int]]) -> None:
        for batch in batches:
            assert batch.members
            assert sum(batch.members.values()) == batch.inputs <= MOST
            for member, inputs in batch.members.items():
                group, said, _ = self.waiting.pop(member)  # once, and only who waited
                assert (group, said) == (batch.group, inputs)
            self.under_way.append(batch)

    @rule(group=st.sampled_from("gh"), inputs=st.integers(1, MOST))
    def arrive(self, group: str, inputs: int) -> None:
        self.count += 1
        alone = not any(batch.group == group for batch in self.under_way)
        self.waiting[self.count] = (group, inputs, self.now)
        self.left(self.windows.arrive(group, self.count, inputs, self.now, window_s=WINDOW_S, most=MOST))
        if alone:
            assert self.count not in self.waiting

    @rule(elapsed=st.floats(0, 0.003))
    def time_passes(self, elapsed: float) -> None:
        self.now += elapsed
        self.left(self.windows.due(self.now))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def returns(self, data: st.DataObject) -> None:
        batch = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        following = self.windows.ended(batch)
        self.left([following] if following is not None else [])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraws(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.waiting)))
        group, _, _ = self.waiting.pop(member)
        assert self.windows.withdraw(group, member)

    @invariant()
    def nobody_waits_past_the_window(self) -> None:
        due = self.windows.next_due
        assert (due is None) == (not self.waiting)
        if due is not None:
            assert due <= min(came for _, _, came in self.waiting.values()) + WINDOW_S

    def teardown(self) -> None:
        self.left(self.windows.due(self.now + 1))
        assert not self.waiting
        while self.under_way:
            assert self.windows.ended(self.under_way.pop()) is None
        assert not self.windows._groups


CoalescingLaws.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestCoalescingLaws = CoalescingLaws.TestCase


@given(st.integers(0, 10**6), st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_shares_are_whole_and_sum_exactly(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    even = weights if any(weights) else [1] * len(weights)
    for part, weight in zip(parts, even, strict=True):
        quota = total * weight / sum(even)
        assert int(quota) <= part <= int(quota) + 1


def test_shares_go_to_the_largest_remainders() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(7, [30, 20, 50]) == [2, 1, 4]
    assert apportion(3, [0, 0]) == [2, 1]
    assert apportion(0, [5]) == [0]
