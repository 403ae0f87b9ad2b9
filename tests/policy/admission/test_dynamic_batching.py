"""Batching windows: a request of an idle group never waits, and no input is lost or sent twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.admission.dynamic_batching import BatchingWindows, RequestBatch, apportion

WINDOW_S = 0.002
MOST = 8


class CoalescingLaws(RuleBasedStateMachine):
    """Members arrive, are withdrawn and are answered in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.windows: BatchingWindows[int] = BatchingWindows()
        self.now = 0.0
        self.count = 0
        self.waiting: dict[int, tuple[str, int, float]] = {}
        self.in_progress: list[RequestBatch[int]] = []

    def check_sent(self, batches: list[RequestBatch[int]]) -> None:
        for batch in batches:
            assert batch.members
            assert sum(batch.members.values()) == batch.inputs <= MOST
            for member, inputs in batch.members.items():
                group, expected, _ = self.waiting.pop(member)  # once, and only while waiting
                assert (group, expected) == (batch.group, inputs)
            self.in_progress.append(batch)

    @rule(group=st.sampled_from("gh"), inputs=st.integers(1, MOST))
    def arrive(self, group: str, inputs: int) -> None:
        self.count += 1
        alone = not any(batch.group == group for batch in self.in_progress)
        self.waiting[self.count] = (group, inputs, self.now)
        self.check_sent(
            self.windows.arrive(group, self.count, inputs, self.now, window_s=WINDOW_S, most=MOST)
        )
        if alone:
            assert self.count not in self.waiting

    @rule(elapsed=st.floats(0, 0.003))
    def time_passes(self, elapsed: float) -> None:
        self.now += elapsed
        self.check_sent(self.windows.due(self.now))

    @precondition(lambda self: self.in_progress)
    @rule(data=st.data())
    def answered(self, data: st.DataObject) -> None:
        batch = self.in_progress.pop(data.draw(st.integers(0, len(self.in_progress) - 1)))
        following = self.windows.ended(batch)
        self.check_sent([following] if following is not None else [])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdrawn(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(sorted(self.waiting)))
        group, _, _ = self.waiting.pop(member)
        assert self.windows.withdraw(group, member)

    @invariant()
    def no_batch_waits_past_its_window(self) -> None:
        due = self.windows.next_due
        assert (due is None) == (not self.waiting)
        if due is not None:
            assert due <= min(arrived for _, _, arrived in self.waiting.values()) + WINDOW_S

    def teardown(self) -> None:
        self.check_sent(self.windows.due(self.now + 1))
        assert not self.waiting
        while self.in_progress:
            assert self.windows.ended(self.in_progress.pop()) is None
        assert not self.windows._groups


CoalescingLaws.TestCase.settings = settings(max_examples=30, stateful_step_count=20)
TestCoalescingLaws = CoalescingLaws.TestCase


@given(st.integers(0, 10**6), st.lists(st.integers(0, 1000), min_size=1, max_size=20))
def test_parts_are_whole_and_sum_exactly(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    even = weights if any(weights) else [1] * len(weights)
    for part, weight in zip(parts, even, strict=True):
        quota = total * weight / sum(even)
        assert int(quota) <= part <= int(quota) + 1


def test_the_largest_remainders_get_one_more() -> None:
    assert apportion(10, [1, 1, 1]) == [4, 3, 3]
    assert apportion(7, [30, 20, 50]) == [2, 1, 4]
    assert apportion(3, [0, 0]) == [2, 1]
    assert apportion(0, [5]) == [0]
