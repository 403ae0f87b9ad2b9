"""A request that kills replicas is found among those that were beside it, and refused for a while."""

from __future__ import annotations

import pytest

from policy.admission.crash_suspects import (
    FORGOTTEN_S,
    MAX_LOSSES,
    REFUSED_S,
    SAME_DEATH_S,
    TOGETHER_S,
    CrashSuspects,
    SuspectRestriction,
)

NONE, ALONE, GUILTY = SuspectRestriction


class Timeline:
    """Deaths of replicas, each with the requests that were in flight on it."""

    def __init__(self) -> None:
        self.suspects = CrashSuspects()
        self.at = 1000.0

    def death(self, replica: int, *requests: int, seen_s: float = 0.5) -> None:
        """``seen_s`` after the first loss the death shows on another connection; before it if negative."""
        self.at += 60.0
        if seen_s < 0:
            self.suspects.died("m", replica, self.at + seen_s)
        for request in requests:
            self.suspects.lost(request, replica, self.at)
        if seen_s >= 0:
            self.suspects.died("m", replica, self.at + seen_s)

    def of(self, *requests: int, later_s: float = 1.0) -> list[SuspectRestriction]:
        return [self.suspects.suspicion(request, self.at + later_s) for request in requests]


@pytest.mark.parametrize("seen_s", [0.5, -0.5])
def test_a_request_alone_at_two_deaths_is_guilty_and_those_beside_it_are_not(seen_s: float) -> None:
    time = Timeline()
    time.death(1, 7, 8, 9, seen_s=seen_s)
    assert time.of(7, 8, 9) == [NONE, NONE, NONE]
    time.death(2, 7, 20, 21, seen_s=seen_s)
    assert time.of(7, 8, 9, 20, 21) == [GUILTY, NONE, NONE, NONE, NONE]


def test_requests_that_moved_together_run_alone_until_one_is_left() -> None:
    time = Timeline()
    time.death(1, 7, 8, 9)
    time.death(2, 7, 8, 9)
    assert time.of(7, 8, 9) == [ALONE, ALONE, ALONE]
    time.suspects.served(8, time.at)
    time.death(2, 7, 30)  # it ran beside a request that is not suspected
    assert time.of(7, 8, 9, 30) == [GUILTY, NONE, ALONE, NONE]


@pytest.mark.parametrize(
    ("others", "apart_s", "verdict"),
    [
        # A cluster that ends: a replica died without the request, so it ended none of them.
        ((3,), 1.0, NONE),
        # Replicas that died at other times, or none: two engines did not survive the request.
        ((3,), 30.0, GUILTY),
        ((), 0.0, GUILTY),
        # It was at the death of every replica.
        ((1, 2), 0.0, GUILTY),
    ],
)
def test_a_request_did_not_end_what_was_lost_with_replicas_that_it_never_reached(
    others: tuple[int, ...], apart_s: float, verdict: SuspectRestriction
) -> None:
    suspects, at = CrashSuspects(), 1000.0
    for replica in (1, 2):
        at += 0.2
        suspects.lost(7, replica, at)
        suspects.died("m", replica, at)
    for replica in others:
        suspects.died("m", replica, at + apart_s)
    suspects.died("of another model", 4, at)
    assert suspects.suspicion(7, at + 60.0) is verdict
    assert suspects.excused(7, at + 60.0) is (verdict is NONE)
    assert not suspects.excused(8, at)


def test_copies_of_one_request_count_one_by_one() -> None:
    """A body that many clients send is at every death."""
    time = Timeline()
    time.death(1, 7, 7, 7)
    time.death(2, 7, 7)
    assert time.of(7) == [ALONE]


def test_a_lost_connection_is_no_death_and_an_answer_clears() -> None:
    time = Timeline()
    time.death(1, 7)
    time.at += 60.0
    time.suspects.lost(7, 2, time.at)
    assert time.of(7) == [NONE]
    time.suspects.served(7, time.at)
    time.death(2, 7)
    assert time.of(7) == [NONE]


def test_the_guilty_run_alone_after_a_while_and_are_forgotten_later() -> None:
    time = Timeline()
    time.death(1, 7)
    time.death(2, 7)
    assert time.of(7, later_s=REFUSED_S) == [GUILTY]
    assert time.of(7, later_s=REFUSED_S + 1.0) == [ALONE]
    assert time.of(7, later_s=FORGOTTEN_S + 1.0) == [NONE]
    assert not time.suspects


def test_the_number_of_losses_is_bounded() -> None:
    time = Timeline()
    time.death(1, *range(10 * MAX_LOSSES))
    assert len(time.suspects) == MAX_LOSSES


def test_a_request_that_ends_engines_again_and_again_is_kept() -> None:
    """Between its deaths more requests are lost than are kept."""
    time = Timeline()
    for replica in range(8):
        time.death(replica, 7, *range(1000 * replica + 100, 1000 * replica + 400))
        assert time.of(7) == [NONE if replica == 0 else GUILTY]


def test_a_loss_counts_for_the_nearest_death() -> None:
    time = Timeline()
    for apart_s in (60.0, SAME_DEATH_S + 0.1):
        time.at += apart_s
        time.suspects.died("m", 1, time.at)
    time.suspects.lost(7, 1, time.at - SAME_DEATH_S - 0.1)
    time.suspects.lost(7, 1, time.at - 0.1)
    assert time.of(7) == [GUILTY]


def test_copies_that_are_lost_together_are_kept_as_one() -> None:
    """They do not displace what else was lost, and another request's two deaths stay known."""
    time = Timeline()
    time.death(1, 9, *[7] * (10 * MAX_LOSSES))
    time.death(2, 9)
    assert time.of(7, 9) == [NONE, GUILTY]
    time.death(3, *[7] * (10 * MAX_LOSSES))
    assert time.of(7) == [ALONE]


def test_a_copy_that_is_lost_after_another_was_served_counts() -> None:
    suspects, at = CrashSuspects(), 1000.0
    suspects.lost(7, 1, at)
    suspects.served(7, at + TOGETHER_S / 4)
    suspects.lost(7, 1, at + TOGETHER_S / 2)
    suspects.died("m", 1, at + TOGETHER_S)
    suspects.lost(7, 2, at + 60.0)
    suspects.died("m", 2, at + 60.0)
    assert suspects.suspicion(7, at + 61.0) is GUILTY
