"""Breakers open on failures and close by a probe; retries stay within their budget."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policy.config.deployment import OutlierEjection, RetryBudget
from policy.routing.replica_health import (
    MIN_VOLUME,
    AttemptResult,
    CircuitBreaker,
    CircuitBreakerState,
    HealthCounters,
    ReplicaHealth,
    ReplicaWatchdog,
)

LIMITS = OutlierEjection(
    failures=5, success_rate=0.85, window_s=10.0, base_s=30.0, max_s=300.0, max_fraction=0.5
)
MIDDLE = 0.5  # the draw that leaves the ejection time as it is


def health_of(eject: OutlierEjection = LIMITS, retry: RetryBudget | None = None) -> ReplicaHealth:
    health = ReplicaHealth(HealthCounters(), lambda: MIDDLE)
    health.configure(eject, retry or RetryBudget())
    return health


def model(count: int, limits: OutlierEjection = LIMITS) -> tuple[ReplicaHealth, list[CircuitBreaker]]:
    health = health_of(limits)
    return health, [health.join() for _ in range(count)]


def fail(health: ReplicaHealth, breaker: CircuitBreaker, at: float, times: int = 5) -> bool:
    return [health.record(breaker, AttemptResult.BAD, at) for _ in range(times)][-1]


def ejected(limits: OutlierEjection = LIMITS) -> tuple[ReplicaHealth, CircuitBreaker]:
    """The first of two replicas, ejected at 0."""
    health, (one, _) = model(2, limits)
    fail(health, one, 0.0)
    return health, one


def readmit(breaker: CircuitBreaker, at: float, result: AttemptResult = AttemptResult.GOOD) -> None:
    assert breaker.due(at)
    breaker.half_open()
    assert breaker.take_probe()
    breaker.probed(result, at, MIDDLE)


def test_failures_in_a_row_eject() -> None:
    health, (one, _) = model(2)
    assert not fail(health, one, 0.0, 4)
    health.record(one, AttemptResult.GOOD, 0.0)
    assert not fail(health, one, 0.0, 4)
    assert fail(health, one, 0.0, 1)
    assert not health.admits(one)


def test_results_without_meaning_for_the_replica_do_not_count() -> None:
    health, (one, _) = model(2)
    fail(health, one, 0.0, 4)
    assert not any(health.record(one, AttemptResult.NOTHING, 0.0) for _ in range(100))
    assert fail(health, one, 0.0, 1)


def test_a_third_of_failures_ejects_once_the_volume_is_reached() -> None:
    health, (one, _) = model(2)
    answers = 0
    while one.state is CircuitBreakerState.CLOSED:
        result = AttemptResult.BAD if answers % 3 == 2 else AttemptResult.GOOD
        health.record(one, result, answers * 0.1)
        answers += 1
    assert MIN_VOLUME <= answers <= MIN_VOLUME + 2


def test_failures_older_than_the_window_do_not_count() -> None:
    health, (one, _) = model(2)
    for i in range(200):
        health.record(one, AttemptResult.BAD if i % 20 == 0 else AttemptResult.GOOD, i * 0.1)
    for i in range(8):  # with those before, two good and six bad would be too many
        health.record(one, AttemptResult.BAD if i % 4 else AttemptResult.GOOD, 40.0 + i * 0.1)
    assert one.state is CircuitBreakerState.CLOSED


def test_the_ejection_time_of_a_flapping_replica_grows() -> None:
    """Healthy in even seconds, failing in odd ones, probed as soon as due."""
    health, (one, _) = model(2, OutlierEjection(base_s=1.0, max_s=60.0))
    readmitted = []
    at = 0.0
    while at < 120.0:
        healthy = int(at) % 2 == 0
        if one.state is CircuitBreakerState.CLOSED:
            health.record(one, AttemptResult.GOOD if healthy else AttemptResult.BAD, at)
        elif one.due(at):
            readmit(one, at, AttemptResult.GOOD if healthy else AttemptResult.BAD)
            readmitted += [at] * healthy
        at += 0.05
    assert 2 <= len(readmitted) <= 10
    assert readmitted[-1] - readmitted[-2] > 3 * (readmitted[1] - readmitted[0])


def test_the_ejection_time_shrinks_after_healthy_time() -> None:
    health, one = ejected()
    readmit(one, 30.0)
    fail(health, one, 31.0)
    assert not one.due(90.0)
    readmit(one, 91.0)
    fail(health, one, 91.0 + 60.0 + 30.0)
    assert one.due(91.0 + 90.0 + 30.0)


def test_the_ejection_time_is_bounded() -> None:
    health, (one, _) = model(2, OutlierEjection(base_s=30.0, max_s=40.0))
    at = 0.0
    for _ in range(3):
        fail(health, one, at)
        assert one.due(at + 40.0)
        readmit(one, at + 40.0)
        at += 40.0


@pytest.mark.parametrize(("draw", "lasts_s"), [(0.0, 27.0), (0.5, 30.0), (1.0, 33.0)])
def test_the_draw_spreads_the_probes_of_many_workers(draw: float, lasts_s: float) -> None:
    breaker = CircuitBreaker(LIMITS)
    breaker.open(0.0, draw)
    assert not breaker.due(lasts_s - 0.1)
    assert breaker.due(lasts_s + 0.1)


def test_a_new_process_is_probed_at_once_with_cleared_counts() -> None:
    health, one = ejected()
    one.renew(1.0)
    assert one.due(1.0)
    assert not health.admits(one)
    readmit(one, 1.0)
    assert not fail(health, one, 1.0, 4)


def test_repeated_disconnections_eject() -> None:
    health, (one, _) = model(2)
    assert not health.disconnected(one, 0.0)
    assert not health.disconnected(one, 1.0)
    assert not health.disconnected(one, 20.0)
    assert not health.disconnected(one, 21.0)
    assert health.disconnected(one, 22.0)
    one.renew(23.0)
    readmit(one, 23.0)
    for at in (24.0, 25.0):
        health.disconnected(one, at)
    one.renew(26.0)
    assert not one.due(26.0)


def test_a_reconnection_clears_failures_but_not_an_ejection() -> None:
    health, (one, _) = model(2)
    fail(health, one, 0.0, 4)
    one.reconnected()
    assert not fail(health, one, 0.0, 4)
    assert fail(health, one, 0.0, 1)
    one.reconnected()
    assert not one.due(1.0)


def test_at_most_half_are_ejected_and_all_fail_knows_the_rest() -> None:
    health, breakers = model(4)
    for breaker in breakers:
        assert not health.all_fail(0.0)
        fail(health, breaker, 0.0)
    assert [breaker.state for breaker in breakers] == [CircuitBreakerState.OPEN] * 2 + [
        CircuitBreakerState.CLOSED
    ] * 2
    assert health.all_fail(0.0)
    health.record(breakers[3], AttemptResult.GOOD, 0.0)
    assert not health.all_fail(0.0)


def test_new_limits_apply_to_existing_breakers() -> None:
    health, (one, _) = model(2)
    health.configure(OutlierEjection(failures=2), RetryBudget())
    assert fail(health, one, 0.0, 2)


def test_a_new_window_applies_to_existing_breakers() -> None:
    health, (one, _) = model(2)
    health.configure(OutlierEjection(failures=99, window_s=100.0), RetryBudget())
    assert not fail(health, one, 1.0, MIN_VOLUME - 1)
    assert fail(health, one, 60.0, 1)


def test_a_removed_replica_does_not_count() -> None:
    health, (one, two) = model(2)
    health.leave(two)
    assert not fail(health, one, 0.0)


def test_the_watchdog_counts_from_the_last_progress_while_requests_are_held() -> None:
    watchdog = ReplicaWatchdog()
    assert watchdog.stuck_s(0, 0, 0.0) == 0.0
    assert watchdog.stuck_s(1, 0, 100.0) == 0.0
    assert watchdog.stuck_s(1, 0, 104.0) == 4.0
    assert watchdog.stuck_s(1, 7, 105.0) == 0.0
    assert watchdog.stuck_s(0, 7, 200.0) == 0.0
    assert watchdog.stuck_s(2, 7, 300.0) == 0.0


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5])
def test_replicas_that_serve_nothing_are_all_ejected_once_another_serves_well(fraction: float) -> None:
    health, (good, *bad) = model(5, OutlierEjection(max_fraction=fraction))
    fraction_of_five = int(5 * fraction)
    for breaker in bad:
        fail(health, breaker, 0.0)
    assert [b.state for b in bad].count(CircuitBreakerState.OPEN) == fraction_of_five
    health.record(good, AttemptResult.GOOD, 0.0)
    for breaker in bad:
        health.record(breaker, AttemptResult.BAD, 0.0)
    assert [b.state for b in bad].count(CircuitBreakerState.OPEN) == (4 if fraction else 0)
    assert not fail(health, good, 0.0), "never the last"


class Rotation(RuleBasedStateMachine):
    """Replicas that disconnect, reconnect, fail and are probed in any order."""

    @initialize(count=st.integers(1, 6), fraction=st.floats(0, 1), failures=st.integers(1, 4))
    def begin(self, count: int, fraction: float, failures: int) -> None:
        self.limits = OutlierEjection(
            failures=failures, max_fraction=fraction, base_s=1.0, max_s=8.0, window_s=5.0
        )
        self.health, self.breakers = model(count, self.limits)
        self.at = 0.0
        self.probes: set[int] = set()
        self.probed = [0] * count
        self.before = [CircuitBreakerState.CLOSED] * count

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.breakers) - 1))

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.at += seconds

    @rule(data=st.data(), result=st.sampled_from(AttemptResult))
    def attempt(self, data: st.DataObject, result: AttemptResult) -> None:
        self.check_ejection(lambda breaker: self.health.record(breaker, result, self.at), data)

    @rule(data=st.data())
    def watchdog(self, data: st.DataObject) -> None:
        self.check_ejection(lambda breaker: self.health.stalled(breaker, self.at), data)

    @rule(data=st.data())
    def flap(self, data: st.DataObject) -> None:
        self.check_ejection(lambda breaker: self.health.disconnected(breaker, self.at), data)

    @rule(data=st.data())
    def reconnect(self, data: st.DataObject) -> None:
        self.breakers[self.pick(data)].reconnected()

    def check_ejection(self, act, data: st.DataObject) -> None:  # type: ignore[no-untyped-def]
        breaker = self.breakers[self.pick(data)]
        was, serving = breaker.state, self.serving()
        ejected = act(breaker)
        assert ejected == (was is CircuitBreakerState.CLOSED and breaker.state is CircuitBreakerState.OPEN)
        if ejected:
            within = self.ejected() <= self.limits.max_fraction * len(self.breakers)
            assert within or any(b.serves_well(self.at) for b in self.breakers)
            assert serving - 1 >= self.serving() > 0 or not breaker.reachable

    def ejected(self) -> int:
        return sum(b.state is not CircuitBreakerState.CLOSED for b in self.breakers)

    def serving(self) -> int:
        return sum(b.reachable and b.state is CircuitBreakerState.CLOSED for b in self.breakers)

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
    @rule(data=st.data(), result=st.sampled_from(AttemptResult), draw=st.floats(0, 1, exclude_max=True))
    def answer(self, data: st.DataObject, result: AttemptResult, draw: float) -> None:
        i = data.draw(st.sampled_from(sorted(self.probes)))
        self.probes.remove(i)
        self.breakers[i].probed(result, self.at, draw)
        self.probed[i] += result is AttemptResult.GOOD

    @rule(data=st.data())
    def replace_process(self, data: st.DataObject) -> None:
        self.breakers[self.pick(data)].renew(self.at)

    @invariant()
    def only_a_good_probe_closes(self) -> None:
        for i, breaker in enumerate(self.breakers):
            closed = (
                breaker.state is CircuitBreakerState.CLOSED
                and self.before[i] is not CircuitBreakerState.CLOSED
            )
            assert self.probed[i] == closed
            self.probed[i] = 0
            self.before[i] = breaker.state

    @invariant()
    def a_reachable_replica_is_admitted(self) -> None:
        if any(b.reachable for b in self.breakers):
            assert any(b.reachable and self.health.admits(b) for b in self.breakers)

    @invariant()
    def a_probed_breaker_is_half_open(self) -> None:
        assert all(b.probing == (i in self.probes) for i, b in enumerate(self.breakers))
        assert all(b.state is CircuitBreakerState.HALF_OPEN for b in self.breakers if b.probing)


class Retries(RuleBasedStateMachine):
    """Requests and retries within one window and beyond it."""

    @initialize(budget=st.floats(0, 1), at_least=st.integers(0, 5))
    def begin(self, budget: float, at_least: int) -> None:
        self.limits = RetryBudget(budget=budget, at_least=at_least, window_s=10.0)
        self.health = health_of(retry=self.limits)
        self.at = 0.0
        self.requests: list[float] = []
        self.retries: list[float] = []

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.at += seconds

    @rule(count=st.integers(1, 50))
    def request(self, count: int) -> None:
        for _ in range(count):
            self.health.request(self.at)
        self.requests += [self.at] * count

    @rule(count=st.integers(1, 30))
    def retry(self, count: int) -> None:
        allowed = sum(self.health.may_retry(self.at) for _ in range(count))
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
    def retries_stay_within_the_budget_of_the_first_window(self) -> None:
        if self.at < self.limits.window_s:
            share = self.limits.budget * len(self.requests)
            assert len(self.retries) <= share + self.limits.at_least


TestRotation = pytest.mark.slow(Rotation.TestCase)
TestRetries = pytest.mark.slow(Retries.TestCase)
