"""The least count that will do, whatever is guessed, and in few tries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.planning.trial import DEPTH, fewest


@given(least=st.integers(1, 300), guess=st.integers(-5, 500), most=st.integers(1, 300))
def test_it_is_what_trying_all_of_them_finds(least: int, guess: int, most: int) -> None:
    expected = least if least <= most else None
    assert fewest(lambda count: count >= least, guess, most) == expected


@given(least=st.integers(1, 60), guess=st.integers(1, 100), gaps=st.sets(st.integers(1, DEPTH - 1)))
def test_a_count_that_misses_by_chance_just_above_the_least_one_hides_nothing(
    least: int, guess: int, gaps: set[int]
) -> None:
    def meets(count: int) -> bool:
        return count >= least and count - least not in gaps

    assert fewest(meets, guess, 200) == least


@pytest.mark.parametrize(("guess", "most_tries"), [(40, 4), (39, 5), (1, 16), (200, 18)])
def test_a_good_guess_needs_few_tries_and_no_count_is_tried_twice(guess: int, most_tries: int) -> None:
    tries: list[int] = []

    def meets(count: int) -> bool:
        tries.append(count)
        return count >= 40

    assert fewest(meets, guess, 1000) == 40
    assert len(tries) == len(set(tries)) <= most_tries
