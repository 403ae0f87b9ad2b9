"""Breakers open by themselves and close by a probe; retries stay within their budget."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policy.config.deployment import Eject, Retry
from policy.routing.replica_health import (
    MIN_VOLUME,
    AttemptResult,
    Breaker,
    BreakerState,
    OutlierEjection,
    RetryBudget,
    Watchdog,
)

LIMITS = Eject(failures=5, success_rate=0.85, window_s=10.0, base_s=30.0, max_s=300.0, max_fraction=0.5)
MIDDLE = 0.5  # the draw that neither lengthens nor shortens


def model(count: int, limits: Eject = LIMITS) -> tuple[OutlierEjection, list[Breaker]]:
    ejections = OutlierEjection(limits)
    return ejections, [ejections.join() for _ in range(count)]


def fail(ejections: OutlierEjection, breaker: Breaker, at: float, times: int = 5) -> bool:
    return [ejections.note(breaker, AttemptResult.BAD, at, MIDDLE) for _ in range(times)][-1]


def ejected(limits: Eject = LIMITS) -> tuple[OutlierEjection, Breaker]:
    """The first of two replicas, ejected at 0."""
    ejections, (one, _) = model(2, limits)
    fail(ejections, one, 0.0)
    return ejections, one


def readmit(breaker: Breaker, at: float, sign: AttemptResult = AttemptResult.GOOD) -> None:
    assert breaker.due(at)
    breaker.half_open()
    assert breaker.take_probe()
    breaker.probed(sign, at, MIDDLE)


def test_failures_in_a_row_eject() -> None:
    ejections, (one, _) = model(2)
    assert not fail(ejections, one, 0.0, 4)
    ejections.note(one, AttemptResult.GOOD, 0.0, MIDDLE)
    assert not fail(ejections, one, 0.0, 4)
    assert fail(ejections, one, 0.0, 1)
    assert not ejections.admits(one)


def test_what_says_nothing_of_a_replica_changes_nothing() -> None:
    ejections, (one, _) = model(2)
    fail(ejections, one, 0.0, 4)
    assert not any(ejections.note(one, AttemptResult.NOTHING, 0.0, MIDDLE) for _ in range(100))
    assert fail(ejections, one, 0.0, 1)


def test_a_third_of_failures_ejects_once_there_is_enough_to_judge() -> None:
    ejections, (one, _) = model(2)
    answers = 0
    while one.state is BreakerState.CLOSED:
        sign = AttemptResult.BAD if answers % 3 == 2 else AttemptResult.GOOD
        ejections.note(one, sign, answers * 0.1, MIDDLE)
        answers += 1
    assert MIN_VOLUME <= answers <= MIN_VOLUME + 2


def test_failures_that_are_older_than_the_window_are_forgotten() -> None:
    ejections, (one, _) = model(2)
    for i in range(200):
        ejections.note(one, AttemptResult.BAD if i % 20 == 0 else AttemptResult.GOOD, i * 0.1, MIDDLE)
    for i in range(8):  # beside what came before, two good and six bad would be too many
        ejections.note(one, AttemptResult.BAD if i % 4 else AttemptResult.GOOD, 40.0 + i * 0.1, MIDDLE)
    assert one.state is BreakerState.CLOSED


def test_flapping_at_1_hz_is_readmitted_ever_more_seldom() -> None:
    """Well in even seconds, failing in odd ones, probed as soon as may be."""
    ejections, (one, _) = model(2, Eject(base_s=1.0, max_s=60.0))
    readmitted = []
    at = 0.0
    while at < 120.0:
        well = int(at) % 2 == 0
        if one.state is BreakerState.CLOSED:
            ejections.note(one, AttemptResult.GOOD if well else AttemptResult.BAD, at, MIDDLE)
        elif one.due(at):
            readmit(one, at, AttemptResult.GOOD if well else AttemptResult.BAD)
            readmitted += [at] * well
        at += 0.05
    assert 2 <= len(readmitted) <= 10
    assert readmitted[-1] - readmitted[-2] > 3 * (readmitted[1] - readmitted[0])


def test_good_time_forgives() -> None:
    ejections, one = ejected()
    readmit(one, 30.0)
    fail(ejections, one, 31.0)
    assert not one.due(90.0)
    readmit(one, 91.0)
    fail(ejections, one, 91.0 + 60.0 + 30.0)
    assert one.due(91.0 + 90.0 + 30.0)


def test_an_ejection_ends_at_the_longest() -> None:
    ejections, (one, _) = model(2, Eject(base_s=30.0, max_s=40.0))
    at = 0.0
    for _ in range(3):
        fail(ejections, one, at)
        assert one.due(at + 40.0)
        readmit(one, at + 40.0)
        at += 40.0


@pytest.mark.parametrize(("draw", "lasts_s"), [(0.0, 27.0), (0.5, 30.0), (1.0, 33.0)])
def test_the_draw_spreads_the_probes_of_many_workers(draw: float, lasts_s: float) -> None:
    breaker = Breaker(LIMITS)
    breaker.open(0.0, draw)
    assert not breaker.due(lasts_s - 0.1)
    assert breaker.due(lasts_s + 0.1)


def test_a_new_process_is_probed_at_once_and_starts_without_guilt() -> None:
    ejections, one = ejected()
    one.renew(1.0)
    assert one.due(1.0)
    assert not ejections.admits(one)
    readmit(one, 1.0)
    assert not fail(ejections, one, 1.0, 4)


def test_who_goes_away_again_and_again_stays_out_for_a_while() -> None:
    ejections, (one, _) = model(2)
    assert not ejections.lost(one, 0.0, MIDDLE)
    assert not ejections.lost(one, 1.0, MIDDLE)
    assert not ejections.lost(one, 20.0, MIDDLE)
    assert not ejections.lost(one, 21.0, MIDDLE)
    assert ejections.lost(one, 22.0, MIDDLE)
    one.renew(23.0)
    readmit(one, 23.0)
    for at in (24.0, 25.0):
        ejections.lost(one, at, MIDDLE)
    one.renew(26.0)
    assert not one.due(26.0)


def test_what_failed_as_it_went_away_is_not_held_against_what_came_back() -> None:
    ejections, (one, _) = model(2)
    fail(ejections, one, 0.0, 4)
    one.reconnected()
    assert not fail(ejections, one, 0.0, 4)
    assert fail(ejections, one, 0.0, 1)
    one.reconnected()
    assert not one.due(1.0)


def test_half_of_them_are_out_at_most_and_what_fails_beside_them_is_known() -> None:
    ejections, breakers = model(4)
    for breaker in breakers:
        assert not ejections.all_fail(0.0)
        fail(ejections, breaker, 0.0)
    assert [breaker.state for breaker in breakers] == [BreakerState.OPEN] * 2 + [BreakerState.CLOSED] * 2
    assert ejections.all_fail(0.0)
    ejections.note(breakers[3], AttemptResult.GOOD, 0.0, MIDDLE)
    assert not ejections.all_fail(0.0)


def test_other_limits_act_on_replicas_that_are_there() -> None:
    ejections, (one, _) = model(2)
    ejections.follow(Eject(failures=2))
    assert fail(ejections, one, 0.0, 2)


def test_who_left_counts_no_more() -> None:
    ejections, (one, two) = model(2)
    ejections.leave(two)
    assert not fail(ejections, one, 0.0)


def test_silence_counts_from_the_last_progress_and_only_while_something_is_held() -> None:
    dog = Watchdog()
    assert dog.stuck_s(0, 0, 0.0) == 0.0
    assert dog.stuck_s(1, 0, 100.0) == 0.0
    assert dog.stuck_s(1, 0, 104.0) == 4.0
    assert dog.stuck_s(1, 7, 105.0) == 0.0
    assert dog.stuck_s(0, 7, 200.0) == 0.0
    assert dog.stuck_s(2, 7, 300.0) == 0.0


class Rotation(RuleBasedStateMachine):
    """A model whose replicas come, go, fail and are probed in any order."""

    @initialize(count=st.integers(1, 6), fraction=st.floats(0, 1), failures=st.integers(1, 4))
    def begin(self, count: int, fraction: float, failures: int) -> None:
        self.limits = Eject(failures=failures, max_fraction=fraction, base_s=1.0, max_s=8.0, window_s=5.0)
        self.ejections, self.breakers = model(count, self.limits)
        self.at = 0.0
        self.probes: set[int] = set()
        self.probed = [0] * count
        self.before = [BreakerState.CLOSED] * count

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.breakers) - 1))

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.at += seconds

    @rule(data=st.data(), sign=st.sampled_from(AttemptResult), draw=st.floats(0, 1, exclude_max=True))
    def attempt(self, data: st.DataObject, sign: AttemptResult, draw: float) -> None:
        self.eject_lawfully(lambda breaker: self.ejections.note(breaker, sign, self.at, draw), data)

    @rule(data=st.data(), draw=st.floats(0, 1, exclude_max=True))
    def watchdog(self, data: st.DataObject, draw: float) -> None:
        self.eject_lawfully(lambda breaker: self.ejections.eject(breaker, self.at, draw), data)

    @rule(data=st.data(), draw=st.floats(0, 1, exclude_max=True))
    def flap(self, data: st.DataObject, draw: float) -> None:
        self.eject_lawfully(lambda breaker: self.ejections.lost(breaker, self.at, draw), data)

    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        self.breakers[self.pick(data)].reconnected()

    def eject_lawfully(self, act, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
        breaker = self.breakers[self.pick(data)]
        was, serving = breaker.state, self.serving()
        ejected = act(breaker)
        assert ejected == (was is BreakerState.CLOSED and breaker.state is BreakerState.OPEN)
        if ejected:
            assert self.ejections.ejected <= self.limits.max_fraction * len(self.breakers)
            assert serving - 1 >= self.serving() > 0 or not breaker.reachable

    def serving(self) -> int:
        return sum(b.reachable and b.state is BreakerState.CLOSED for b in self.breakers)

    @rule(data=st.data())
    def reachability(self, data: st.DataObject) -> None:
        breaker = self.breakers[self.pick(data)]
        breaker.reachable = not breaker.reachable

    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        breaker = self.breakers[self.pick(data)]
        if breaker.due(self.at):
            breaker.half_open()

    @rule(data=st.data())
    def probe(self, data: st.DataObject) -> None:
        i = self.pick(data)
        if self.breakers[i].take_probe():
            assert i not in self.probes
            self.probes.add(i)

    @precondition(lambda self: self.probes)
    @rule(data=st.data(), sign=st.sampled_from(AttemptResult), draw=st.floats(0, 1, exclude_max=True))
    def answer(self, data: st.DataObject, sign: AttemptResult, draw: float) -> None:
        i = data.draw(st.sampled_from(sorted(self.probes)))
        self.probes.remove(i)
        self.breakers[i].probed(sign, self.at, draw)
        self.probed[i] += sign is AttemptResult.GOOD

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.breakers[self.pick(data)].renew(self.at)

    @invariant()
    def only_a_good_probe_closes(self) -> None:
        for i, breaker in enumerate(self.breakers):
            closed = breaker.state is BreakerState.CLOSED and self.before[i] is not BreakerState.CLOSED
            assert self.probed[i] == closed
            self.probed[i] = 0
            self.before[i] = breaker.state

    @invariant()
    def something_that_can_be_reached_is_admitted(self) -> None:
        if any(b.reachable for b in self.breakers):
            assert any(b.reachable and self.ejections.admits(b) for b in self.breakers)

    @invariant()
    def what_is_probed_is_half_open(self) -> None:
        assert all(b.probing == (i in self.probes) for i, b in enumerate(self.breakers))
        assert all(b.state is BreakerState.HALF_OPEN for b in self.breakers if b.probing)


class Retries(RuleBasedStateMachine):
    """Requests and retries over a time in which no window ends, and after it."""

    @initialize(budget=st.floats(0, 1), at_least=st.integers(0, 5))
    def begin(self, budget: float, at_least: int) -> None:
        self.limits = Retry(budget=budget, at_least=at_least, window_s=10.0)
        self.budget = RetryBudget(self.limits)
        self.at = 0.0
        self.requests: list[float] = []
        self.retries: list[float] = []

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.at += seconds

    @rule(count=st.integers(1, 50))
    def request(self, count: int) -> None:
        for _ in range(count):
            self.budget.request(self.at)
        self.requests += [self.at] * count

    @rule(count=st.integers(1, 30))
    def retry(self, count: int) -> None:
        allowed = sum(self.budget.take(self.at) for _ in range(count))
        self.retries += [self.at] * allowed
        # A slot expires whole, so that up to a slot less or more of the past counts.
        recent = sum(at > self.at - self.limits.window_s for at in self.requests)
        retries = sum(at > self.at - self.limits.window_s * 0.9 for at in self.retries)
        if allowed:
            assert retries <= max(self.limits.at_least, self.limits.budget * recent)
        if allowed < count:
            surely = sum(at > self.at - self.limits.window_s * 0.9 for at in self.requests)
            spent = sum(at > self.at - self.limits.window_s for at in self.retries)
            assert spent + 1 > max(self.limits.at_least, self.limits.budget * surely)

    @invariant()
    def attempts_stay_within_the_budget_of_the_first_window(self) -> None:
        if self.at < self.limits.window_s:
            share = self.limits.budget * len(self.requests)
            assert len(self.retries) <= share + self.limits.at_least


TestRotation = pytest.mark.slow(Rotation.TestCase)
TestRetries = pytest.mark.slow(Retries.TestCase)
