"""The queue: priorities, restored places, bounds, deadlines and predicted waits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.admission.fairness import FairQueue
from policy.admission.queue import AdmissionQueue, AdmittedRequest, QueueLimits, retry_after
from policy.errors import Refusal
from policy.request import Request
from policy.types import Priority

WIDE = QueueLimits(1000, 10**9)


def queue_of() -> AdmissionQueue:
    queue = AdmissionQueue(FairQueue)
    queue.serve(0.0, ready=True)
    return queue


def request(queue: AdmissionQueue, tenant: str = "", tokens: int = 10, **more: object) -> Request:
    return Request("m", tenant=tenant, prompt_tokens=tokens, ticket=queue.ticket(), **more)  # type: ignore[arg-type]


def enter(
    queue: AdmissionQueue, tenant: str = "", tokens: int = 10, at: float = 0.0, **more: object
) -> Request:
    newcomer = request(queue, tenant, tokens, **more)
    assert queue.enter(newcomer, WIDE, at).refusal is None
    return newcomer


def order(queue: AdmissionQueue) -> list[Request]:
    return [turn.request for turn in queue.walk()]


def measured_queue(
    tokens_per_s: float = 100.0, *, priority: Priority = Priority.STANDARD
) -> tuple[AdmissionQueue, float]:
    """A queue that served requests of 10 tokens for 20 s at a rate, never empty; the time after it."""
    queue = queue_of()
    at, step = 0.0, 10 / tokens_per_s
    enter(queue, at=at, priority=priority)
    while at < 20.0:
        enter(queue, at=at, priority=priority)
        at += step
        queue.ended(queue.begin(order(queue)[0], at), at, whole=False)
    for left in order(queue):
        queue.remove(left, at)
    return queue, at


def refusal(queue: AdmissionQueue, newcomer: Request, at: float, **how: Any) -> Refusal | None:
    return queue.enter(newcomer, WIDE, at, **how).refusal


def predicted_wait(queue: AdmissionQueue, newcomer: Request, at: float, *, full: bool = False) -> float:
    verdict = queue.enter(newcomer, WIDE, at, full=full)
    queue.remove(newcomer, at)
    assert verdict.wait_s is not None
    return verdict.wait_s


def test_a_full_queue_prefers_the_tenant_with_less_in_it() -> None:
    queue = queue_of()
    bounds = QueueLimits(3, 10**9)
    enter(queue, "busy_tenant")
    enter(queue, "busy_tenant")
    youngest = enter(queue, "busy_tenant")
    assert queue.enter(request(queue, "quiet"), bounds, 0.0).displaced == (youngest,)
    assert queue.enter(request(queue, "busy_tenant"), bounds, 0.0).refusal is Refusal.QUEUE_FULL
    # Its backlog equals the other's now.
    assert queue.enter(request(queue, "quiet"), bounds, 0.0).refusal is Refusal.QUEUE_FULL


def test_the_predicted_wait_is_the_backlog_over_the_rate() -> None:
    queue, at = measured_queue()
    for _ in range(20):
        enter(queue, at=at)
    assert predicted_wait(queue, request(queue), at) == pytest.approx(205 / 100.0, rel=0.05)


def test_a_tenant_does_not_wait_for_the_backlog_of_others() -> None:
    queue, at = measured_queue()
    for _ in range(50):
        enter(queue, "busy_tenant", at=at)
    enter(queue, "quiet", at=at)
    assert predicted_wait(queue, request(queue, "quiet"), at) < 0.5
    assert predicted_wait(queue, request(queue, "busy_tenant"), at) == pytest.approx(515 / 100.0, rel=0.05)


def test_higher_priorities_reduce_the_rate_of_lower_ones() -> None:
    queue, at = measured_queue(priority=Priority.CRITICAL)
    enter(queue, at=at)
    critical = request(queue, priority=Priority.CRITICAL)
    assert predicted_wait(queue, critical, at) == pytest.approx(5 / 100.0, rel=0.05)
    assert predicted_wait(queue, request(queue), at) > 1.0


def test_a_request_that_would_miss_its_deadline_is_rejected_with_a_retry_time() -> None:
    queue, at = measured_queue()
    for _ in range(100):
        enter(queue, at=at, deadline=at + 60)
    verdict = queue.enter(request(queue, deadline=at + 5), WIDE, at)
    assert verdict.refusal is Refusal.OVERLOADED
    assert verdict.wait_s is not None
    assert verdict.retry_after_s == pytest.approx(verdict.wait_s - 5, abs=1.5)
    assert queue.enter(request(queue, deadline=at + 15), WIDE, at).refusal is None


def test_waits_longer_than_predicted_increase_the_margin() -> None:
    queue, at = measured_queue()
    for _ in range(50):  # the rate was 100/s, but a slot is free every second only
        enter(queue, at=at)
    for _ in range(50):
        at += 1.0
        queue.ended(queue.begin(order(queue)[0], at), at, whole=False)
        enter(queue, at=at, deadline=at + 1e6)
    wait_s = predicted_wait(queue, request(queue), at)
    assert refusal(queue, request(queue, deadline=at + wait_s + 1.0), at) is Refusal.OVERLOADED


def test_the_first_in_the_queue_is_always_tried() -> None:
    queue, at = measured_queue(1.0)
    assert queue.enter(request(queue, tokens=1000, deadline=at + 0.1), WIDE, at).refusal is None


def test_without_served_requests_the_wait_is_unknown() -> None:
    queue = AdmissionQueue(FairQueue)
    for _ in range(50):
        enter(queue)
    queue.serve(0.0, ready=True)
    assert queue.enter(request(queue), WIDE, 0.0).wait_s is None


def test_the_first_rate_is_that_of_the_requests_in_flight() -> None:
    queue = queue_of()
    began = [queue.begin(request(queue), 0.0) for _ in range(8)]
    queue.ended(began.pop(), 2.0, whole=True)
    enter(queue, at=2.0)
    # Seven of 10 tokens that stay 2 s each.
    assert predicted_wait(queue, request(queue), 2.0) == pytest.approx((10 + 5) / 35.0)


def fill_slots(queue: AdmissionQueue, at: float) -> list[AdmittedRequest]:
    """Eight requests take all slots within 70 ms."""
    return [queue.begin(request(queue), at + i / 100) for i in range(8)]


def test_a_slot_is_expected_when_the_oldest_request_reaches_the_mean_service_time() -> None:
    queue = queue_of()
    for one in fill_slots(queue, 0.0):
        queue.ended(one, 2.0, whole=True)
    fill_slots(queue, 10.0)
    waits = [enter(queue, at=10.1) for _ in range(3)]
    assert predicted_wait(queue, request(queue), 10.1, full=True) == pytest.approx(1.83, abs=0.1)
    assert refusal(queue, request(queue, deadline=11.5), 10.1, full=True) is Refusal.OVERLOADED
    for one in waits:
        queue.remove(one, 10.1)
    # None is ahead, but no slot is free.
    assert refusal(queue, request(queue), 10.1, patience_s=1.5, full=True) is Refusal.OVERLOADED
    assert refusal(queue, request(queue), 11.0, patience_s=1.5, full=True) is None
    # It is overdue, and may end at any time.
    assert predicted_wait(queue, request(queue), 13.0, full=True) == pytest.approx((10 + 5) / 80 * 2, rel=0.5)


def test_a_rate_without_ended_requests_follows_from_those_in_flight() -> None:
    queue = queue_of()
    for one in fill_slots(queue, 0.0):
        queue.ended(one, 20.0, whole=True)
    fill_slots(queue, 20.0)
    enter(queue, at=20.1)
    predicted_wait(queue, request(queue), 36.0)
    # By those in flight: eight of 10 tokens that stay 20 s each.
    assert predicted_wait(queue, request(queue), 36.0) < 2 * (10 + 5) / (80 / 20)


def test_far_behind_ends_are_assumed_evenly_spaced() -> None:
    queue = queue_of()
    first = [queue.begin(request(queue), 0.0) for _ in range(1000)]
    queue.ended(first.pop(), 10.0, whole=True)
    for _ in range(500):
        enter(queue, at=10.0)
    assert predicted_wait(queue, request(queue), 10.0, full=True) == pytest.approx(5.0, rel=0.05)


def test_before_a_request_has_ended_the_performance_model_predicts_the_service_time() -> None:
    queue = queue_of()
    assert queue.unmeasured
    fill_slots(queue, 0.0)
    queue.expect(2.0)
    assert refusal(queue, request(queue, deadline=1.1), 0.1, full=True) is Refusal.OVERLOADED
    assert refusal(queue, request(queue, deadline=2.5), 0.1, full=True) is None


def test_patience_bounds_the_predicted_wait_only() -> None:
    queue, at = measured_queue()
    waits = [enter(queue, at=at, deadline=at + 60) for _ in range(10)]
    assert refusal(queue, request(queue, deadline=at + 60), at, patience_s=0.9) is Refusal.OVERLOADED
    assert refusal(queue, request(queue, deadline=at + 60), at, patience_s=1.5) is None
    assert queue.expire(at + 2.0) == []
    assert all(one.ticket in queue.waiting for one in waits)


def test_time_without_replicas_does_not_lower_the_rate() -> None:
    queue, at = measured_queue()
    enter(queue, at=at)
    before = predicted_wait(queue, request(queue), at)
    queue.serve(at, ready=False)
    queue.serve(at + 100.0, ready=True)
    assert predicted_wait(queue, request(queue), at + 100.0) == pytest.approx(before)


@given(st.floats(allow_nan=False))
def test_retry_after_is_whole_and_bounded(seconds: float) -> None:
    assert 1 <= retry_after(seconds) <= 120


class Laws(RuleBasedStateMachine):
    """Against plain dictionaries of what should wait and what should run."""

    DISCIPLINE = FairQueue
    BOUNDS = QueueLimits(6, 60)

    def __init__(self) -> None:
        super().__init__()
        self.queue = AdmissionQueue(self.DISCIPLINE)
        self.waiting: dict[int, Request] = {}
        self.returned: set[int] = set()
        self.open: list[AdmittedRequest] = []
        self.at = 0.0
        self.came = 0
        self.left = 0

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from(Priority),
        size=st.integers(1, 80),
        tokens=st.integers(0, 40),
        lasts_s=st.floats(0.0, 20.0),
        options=st.fixed_dictionaries({"patience_s": st.floats(0.0, 20.0), "full": st.booleans()}),
    )
    def arrive(
        self, tenant: str, priority: Priority, *, size: int, tokens: int, lasts_s: float, options: Any
    ) -> None:
        deadline = self.at + lasts_s
        newcomer = request(self.queue, tenant, tokens, priority=priority, size=size, deadline=deadline)
        full = len(self.waiting) >= self.BOUNDS.requests or (
            self.waiting and sum(r.size for r in self.waiting.values()) + size > self.BOUNDS.size
        )
        verdict = self.queue.enter(newcomer, self.BOUNDS, self.at, **options)
        for displaced in verdict.displaced:
            assert full
            assert list(Priority).index(displaced.priority) >= list(Priority).index(priority)
            assert displaced.ticket not in self.returned
            if displaced.priority is priority:
                assert displaced.tenant != tenant
            del self.waiting[displaced.ticket]
            self.left += 1
        if verdict.refusal is None:
            self.came += 1
            self.waiting[newcomer.ticket] = newcomer
        else:
            assert not verdict.displaced
            assert verdict.refusal is Refusal.OVERLOADED or full

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        first = next(self.queue.walk()).request
        best = min(list(Priority).index(r.priority) for r in self.waiting.values())
        assert list(Priority).index(first.priority) == best
        chosen = self.waiting.pop(data.draw(st.sampled_from([first.ticket, *sorted(self.waiting)])))
        self.open.append(self.queue.begin(chosen, self.at))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), back=st.booleans())
    def end(self, data: st.DataObject, back: bool) -> None:
        began = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.queue.ended(began, self.at, whole=not back)
        if back:
            self.queue.settle(began, 0)
            self.queue.put_back(began.request, self.at)
            self.waiting[began.request.ticket] = began.request
            self.returned.add(began.request.ticket)
        else:
            self.queue.settle(began, data.draw(st.integers(0, 100)))
            self.left += 1

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        gone = self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting))))
        assert self.queue.remove(gone, self.at)
        assert not self.queue.remove(gone, self.at)
        self.left += 1

    @rule(later=st.floats(0.0, 5.0), ready=st.booleans())
    def time_passes(self, later: float, ready: bool) -> None:
        self.at += later
        self.queue.serve(self.at, ready=ready)
        due = {t: r for t, r in self.waiting.items() if r.deadline <= self.at}
        expired = self.queue.expire(self.at)
        assert [r.deadline for r in expired] == sorted(r.deadline for r in due.values())
        assert {r.ticket for r in expired} == set(due)
        for ticket in due:
            del self.waiting[ticket]
            self.left += 1

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        assert self.came == len(self.waiting) + len(self.open) + self.left
        assert sorted(r.ticket for r in order(self.queue)) == sorted(self.waiting)
        assert len(self.queue) == len(self.waiting)
        assert self.queue.size == sum(r.size for r in self.waiting.values())
        assert self.queue.next_deadline() == min((r.deadline for r in self.waiting.values()), default=None)

    @invariant()
    def newcomers_never_exceed_the_bounds(self) -> None:
        new = [r for t, r in self.waiting.items() if t not in self.returned]
        assert len(new) <= self.BOUNDS.requests
        assert len(new) <= 1 or sum(r.size for r in new) <= self.BOUNDS.size

    @invariant()
    def order_holds(self) -> None:
        flows: dict[tuple[str, Priority], int] = {}
        ranks = []
        for one in order(self.queue):
            assert flows.get((one.tenant, one.priority), 0) < one.ticket
            flows[one.tenant, one.priority] = one.ticket
            ranks.append(list(Priority).index(one.priority))
        assert ranks == sorted(ranks)


TestLaws = Laws.TestCase


def test_the_discipline_of_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs/extending.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code = next(block for block in blocks if "class Shortest" in block)
    scope: dict[str, Any] = {"__name__": "docs"}
    exec(code, scope)  # noqa: S102 - it is what a reader would copy
    queue = AdmissionQueue(scope["Shortest"])
    long, short, other = (enter(queue, tokens=tokens) for tokens in (50, 10, 10))
    assert order(queue) == [short, other, long]
    began = queue.begin(short, 0.0)
    queue.settle(began, 0)
    queue.ended(began, 1.0, whole=True)
    queue.put_back(short, 1.0)
    assert order(queue) == [short, other, long]
    bounds = QueueLimits(3, 10**9)
    assert queue.enter(request(queue, deadline=9e9), bounds, 1.0).refusal is Refusal.QUEUE_FULL
    better = request(queue, priority=Priority.CRITICAL, deadline=9e9)
    assert queue.enter(better, bounds, 1.0).displaced == (other,)
