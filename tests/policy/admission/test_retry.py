"""The retry rule: which requests are tried again, and which retries are charged to the budget."""

from __future__ import annotations

import pytest

from policy.admission.retry import AttemptOutcome, Cause, RetryState
from policy.config.deployment import Eject, Retry
from policy.request import Request
from policy.routing.cost import Candidate
from policy.routing.replica_health import AttemptResult, Breaker, HealthCounters, ReplicaHealth

SERVED, BROKEN, REJECTED, REFUSED, FAILED, LOST, SILENT, STALE, UNREACHABLE, LEFT = AttemptOutcome


class Pool:
    """What a retry asks of the replicas."""

    def __init__(self, replicas: int) -> None:
        self._candidates = [Candidate(f"r{i}", i) for i in range(replicas)]

    def candidates(self) -> list[Candidate]:
        return self._candidates

    def serves(self, candidate: Candidate, adapter: str) -> bool:
        return True


class Attempts:
    """Attempts of one request on ``replicas`` in turn, with a budget of ``retries`` for all."""

    def __init__(self, replicas: int, retries: int) -> None:
        self.health = ReplicaHealth(HealthCounters(), lambda: 0.5)
        self.health.configure(Eject(failures=2), Retry(budget=0.0, at_least=retries))
        self.breakers = [self.health.join() for _ in range(replicas)]
        self.pool = Pool(replicas)
        self.request = Request("m")
        self.state = RetryState()

    def after(self, outcome: AttemptOutcome, on: int, *, adapter: bool = False) -> Cause | None:
        rejection = self.state.after(
            outcome, self.request, 0.0, replica=f"r{on}", breaker=self.breakers[on],
            pool=self.pool, health=self.health, adapter_failed=adapter,
        )  # fmt: skip
        return None if rejection is None else rejection.cause

    def may_move(self, to: Breaker) -> bool:
        return self.state.may_move(to, self.health, 0.0)


@pytest.mark.parametrize(
    ("outcomes", "replicas", "retries", "cause", "counted"),
    [
        ([REFUSED] * 5, 2, 0, None, {}),
        ([REJECTED], 2, 9, Cause.REJECTED, {}),
        ([FAILED], 2, 1, None, {"allowed": 1}),
        ([FAILED], 2, 0, Cause.FAILED, {"over_budget": 1}),
        ([FAILED], 1, 1, Cause.FAILED, {}),
        ([FAILED, FAILED], 3, 9, Cause.FAILED, {"allowed": 1}),
        ([SILENT], 2, 1, None, {"allowed": 1}),
        ([STALE], 2, 1, None, {"allowed": 1}),
        ([LOST], 2, 0, None, {"free": 1}),
        ([LOST], 1, 0, None, {"free": 1}),
        ([LOST, LOST], 3, 9, Cause.FAILED, {"free": 1}),
        ([FAILED, LOST], 3, 9, Cause.FAILED, {"allowed": 1}),
        ([UNREACHABLE], 2, 0, None, {"free": 1}),
        ([UNREACHABLE, UNREACHABLE], 3, 9, Cause.RETRIES_SPENT, {"free": 1}),
        ([UNREACHABLE, LOST], 3, 0, None, {"free": 2}),
    ],
)
def test_the_retry_rule(
    outcomes: list[AttemptOutcome], replicas: int, retries: int, cause: Cause | None, counted: dict[str, int]
) -> None:
    attempts = Attempts(replicas, retries)
    found = None
    for i, outcome in enumerate(outcomes):
        found = attempts.after(outcome, i % replicas)
        if found is None:
            assert attempts.may_move(attempts.breakers[(i + 1) % replicas])
    assert found == cause
    assert attempts.health.counters.retries == counted


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
    assert attempts.after(REFUSED, 1, adapter=True) is Cause.ADAPTER


def test_when_all_replicas_fail_the_cause_is_the_fleet() -> None:
    attempts = Attempts(2, 9)
    for breaker in attempts.breakers:
        for _ in range(2):
            attempts.health.record(breaker, AttemptResult.BAD, 0.0)
    attempts.request.begun = 1
    assert attempts.after(FAILED, 0) is Cause.RETRIES_SPENT
    assert attempts.after(LOST, 0) is Cause.FAILED
