"""The retry rule: which requests are tried again, and which retries are charged to the budget."""

from __future__ import annotations

import pytest

from policy.admission.retry_policy import MAX_BEGUN, AttemptOutcome, RejectionCause, RetryState, retryable
from policy.config.deployment import OutlierEjection, RetryBudget
from policy.request import Request
from policy.routing.cost import Candidate
from policy.routing.replica_health import AttemptResult, CircuitBreaker, HealthCounters, ReplicaHealth

FAILURES = 9
(
    SERVED,
    BROKEN,
    REJECTED,
    REFUSED,
    DECLINED,
    DENIED,
    FAILED,
    LOST,
    DROPPED,
    SILENT,
    STALE,
    UNREACHABLE,
    LEFT,
) = AttemptOutcome


class Pool:
    """What a retry asks of the replicas, of which some may be ``busy``."""

    def __init__(self, breakers: list[CircuitBreaker], busy: int = 0) -> None:
        self._all = [Candidate(f"r{i}", i) for i in range(len(breakers))]
        self._breakers = breakers
        self._busy = busy

    def candidates(self) -> list[Candidate]:
        return self._all[: len(self._all) - self._busy]

    def full(self) -> list[Candidate]:
        return self._all[len(self._all) - self._busy :]

    def replica(self, candidate: Candidate) -> Pool:
        self.breaker = self._breakers[candidate.key]
        return self

    def serves(self, candidate: Candidate, adapter: str) -> bool:
        return True


class Attempts:
    """Attempts of one request on ``replicas``, with a budget of ``retries`` for all."""

    def __init__(self, replicas: int, retries: int, *, busy: int = 0) -> None:
        self.health = ReplicaHealth(HealthCounters(), lambda: 0.5)
        self.health.configure(OutlierEjection(failures=FAILURES), RetryBudget(budget=0.0, at_least=retries))
        self.breakers = [self.health.join() for _ in range(replicas)]
        self.pool = Pool(self.breakers, busy)
        self.request = Request("m")
        self.state = RetryState()

    def after(self, outcome: AttemptOutcome, on: int, *, adapter: bool = False) -> RejectionCause | None:
        breaker = self.breakers[on]
        serves_others = breaker.serves_well(0.0)
        self.health.record(breaker, self.state.result(outcome), 0.0)
        rejection = self.state.after(
            outcome, self.request, 0.0, replica=f"r{on}", breaker=breaker, serves_others=serves_others,
            pool=self.pool, health=self.health, adapter_failed=adapter,
        )  # fmt: skip
        return None if rejection is None else rejection.cause

    def serve_others(self, *replicas: int) -> None:
        for replica in replicas:
            for _ in range(20):
                self.health.record(self.breakers[replica], AttemptResult.GOOD, 0.0)

    def may_move(self, to: CircuitBreaker) -> bool:
        return self.state.may_move(to, self.health, 0.0)

    def retryable(self) -> list[str]:
        found = retryable(self.request, self.pool.candidates(), self.pool, 0.0)
        return [each.id for each in found]


@pytest.mark.parametrize(
    ("outcomes", "replicas", "retries", "cause", "counted"),
    [
        ([REFUSED] * 5, 2, 0, None, {}),
        ([REJECTED], 2, 9, RejectionCause.REJECTED, {}),
        ([FAILED], 2, 0, None, {"free": 1}),
        ([FAILED], 1, 9, RejectionCause.FAILED, {}),
        ([FAILED] * 4, 5, 0, None, {"free": 4}),
        ([FAILED] * 5, 5, 0, RejectionCause.FAILED, {"free": 4}),
        ([DECLINED] * 4, 5, 0, None, {"free": 4}),
        ([DECLINED] * 2, 2, 0, RejectionCause.FAILED, {"free": 1}),
        ([DENIED] * 4, 5, 0, None, {"free": 4}),
        ([DENIED] * 2, 2, 0, RejectionCause.REJECTED, {"free": 1}),
        ([SILENT], 2, 0, None, {"free": 1}),
        ([SILENT, SILENT], 3, 9, RejectionCause.FAILED, {"free": 1}),
        ([LOST], 2, 0, None, {"free": 1}),
        ([LOST], 1, 1, None, {"allowed": 1}),
        ([LOST, LOST], 3, 9, RejectionCause.FAILED, {"free": 1}),
        ([FAILED, LOST], 3, 9, None, {"free": 2}),
        ([DROPPED] * 4, 5, 0, None, {"free": 4}),
        ([DROPPED], 1, 1, None, {"allowed": 1}),
        ([DROPPED, DROPPED], 1, 1, RejectionCause.FAILED, {"allowed": 1}),
        ([UNREACHABLE] * 4, 5, 0, None, {"free": 4}),
        ([UNREACHABLE, UNREACHABLE], 1, 1, RejectionCause.RETRIES_SPENT, {"allowed": 1}),
        ([UNREACHABLE, LOST], 3, 0, None, {"free": 2}),
    ],
)
def test_the_retry_rule(
    outcomes: list[AttemptOutcome],
    replicas: int,
    retries: int,
    cause: RejectionCause | None,
    counted: dict[str, int],
) -> None:
    attempts = Attempts(replicas, retries)
    found = None
    for i, outcome in enumerate(outcomes):
        found = attempts.after(outcome, i % replicas)
        if found is None:
            assert attempts.may_move(attempts.breakers[(i + 1) % replicas])
    assert found == cause
    assert attempts.health.counters.retries == counted


@pytest.mark.parametrize(
    ("outcome", "well", "cause"),
    [
        (FAILED, (0, 1), RejectionCause.FAILED),
        (DENIED, (0, 1), RejectionCause.REJECTED),
        (FAILED, (0,), None),
        (DECLINED, (0, 1), None),
        (DROPPED, (0, 1), None),
    ],
)
def test_a_request_that_two_replicas_fail_which_serve_others_is_at_fault(
    outcome: AttemptOutcome, well: tuple[int, ...], cause: RejectionCause | None
) -> None:
    attempts = Attempts(3, 9)
    attempts.serve_others(*well)
    assert attempts.after(outcome, 0) is None
    assert attempts.after(outcome, 1) == cause


@pytest.mark.parametrize(
    ("outcomes", "retries", "cause"),
    [
        ([FAILED, FAILED], 1, None),
        ([DENIED, DENIED], 1, None),
        ([DENIED, FAILED], 1, None),
        ([SILENT, FAILED], 1, None),
        ([FAILED, SILENT], 1, None),
        ([FAILED, FAILED, DENIED], 2, None),
        ([FAILED, FAILED], 0, RejectionCause.FAILED),
        ([DENIED, DENIED], 0, RejectionCause.REJECTED),
        ([FAILED] * 3, 1, RejectionCause.FAILED),
        ([FAILED] * 5, 9, RejectionCause.FAILED),
        ([SILENT, SILENT], 9, RejectionCause.FAILED),
        ([FAILED, FAILED, SILENT, SILENT], 9, RejectionCause.FAILED),
        ([FAILED, LOST], 9, RejectionCause.FAILED),
        ([LOST, DENIED], 9, RejectionCause.REJECTED),
    ],
)
def test_of_two_that_went_bad_at_once_the_budget_pays_for_a_third_that_serves_others(
    outcomes: list[AttemptOutcome], retries: int, cause: RejectionCause | None
) -> None:
    attempts = Attempts(5, retries)
    attempts.serve_others(*range(5))
    found = [attempts.after(outcome, on) for on, outcome in enumerate(outcomes)]
    assert found == [None] * (len(outcomes) - 1) + [cause]
    assert attempts.may_move(attempts.breakers[len(outcomes) % 5]), "it is paid for"


def test_a_request_that_may_be_tried_once_gets_no_third_opinion() -> None:
    attempts = Attempts(3, 9)
    attempts.serve_others(0, 1, 2)
    attempts.request.begun = MAX_BEGUN - 1
    assert attempts.after(FAILED, 0) is RejectionCause.FAILED


@pytest.mark.parametrize("outcome", [FAILED, DENIED])
def test_errors_of_a_third_count_once_another_serves_the_request(outcome: AttemptOutcome) -> None:
    attempts = Attempts(4, 9)
    attempts.serve_others(*range(4))
    for on in range(3):
        assert attempts.after(outcome, on) is None
    assert attempts.breakers[2].streak == 0
    attempts.state.served(attempts.health, 0.0)
    assert [each.streak for each in attempts.breakers] == [1, 1, 1, 0]


def test_a_replica_that_denies_what_another_serves_has_failed() -> None:
    attempts = Attempts(2, 0)
    assert attempts.after(DENIED, 0) is None
    assert not attempts.breakers[0].streak
    attempts.state.served(attempts.health, 0.0)
    assert attempts.breakers[0].streak == 1


def test_replicas_in_good_standing_are_tried_first_and_waited_for() -> None:
    attempts = Attempts(4, 9)
    attempts.after(FAILED, 0)
    attempts.breakers[1].note(AttemptResult.BAD, 0.0)
    assert attempts.retryable() == ["r2", "r3"]
    attempts.breakers[2].doubted = True
    assert attempts.retryable() == ["r3"]
    attempts.pool = Pool(attempts.breakers, busy=1)
    assert attempts.retryable() == []
    attempts.breakers[3].note(AttemptResult.BAD, 0.0)
    assert attempts.retryable() == ["r1", "r2"]
    attempts.request.avoid |= {"r1", "r2", "r3"}
    assert attempts.retryable() == ["r0", "r1", "r2"], "a last resort"


@pytest.mark.parametrize(("retries", "moved"), [(0, False), (1, True)])
def test_a_move_to_a_replica_that_failed_others_is_charged(retries: int, *, moved: bool) -> None:
    attempts = Attempts(2, retries)
    attempts.health.record(attempts.breakers[1], AttemptResult.BAD, 0.0)
    assert attempts.after(LOST, 0) is None
    assert attempts.may_move(attempts.breakers[1]) is moved
    assert attempts.health.counters.retries == {"allowed" if moved else "over_budget": 1}
    assert attempts.may_move(attempts.breakers[1])  # each move is charged once


def test_a_silent_replica_that_was_ejected_counts_as_lost() -> None:
    attempts = Attempts(3, 0)
    attempts.health.stalled(attempts.breakers[0], 0.0)
    assert attempts.after(SILENT, 0) is None
    assert attempts.may_move(attempts.breakers[1])
    assert attempts.health.counters.retries == {"free": 1}


def test_two_failed_adapter_loads_end_the_request() -> None:
    attempts = Attempts(3, 9)
    assert attempts.after(REFUSED, 0, adapter=True) is None
    assert attempts.after(REFUSED, 1, adapter=True) is RejectionCause.ADAPTER


def test_when_all_replicas_fail_the_cause_is_the_fleet() -> None:
    attempts = Attempts(2, 9)
    for breaker in attempts.breakers:
        for _ in range(FAILURES):
            attempts.health.record(breaker, AttemptResult.BAD, 0.0)
    assert attempts.after(FAILED, 0) is None
    assert attempts.after(FAILED, 1) is RejectionCause.RETRIES_SPENT
    attempts.request.begun = 1
    assert attempts.after(LOST, 0) is RejectionCause.FAILED
