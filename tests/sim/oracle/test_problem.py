"""What the oracle is asked must make sense, and is counted from instants."""

from __future__ import annotations

import numpy as np
import pytest

from sim.oracle.problem import Problem, bin_arrivals
from tests.sim.oracle.loads import problem


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"demand": np.array([])}, "demand: got (0,), expected one row of bins"),
        ({"demand": np.array([1.0, -2.0])}, "demand: got [-2.], expected finite counts"),
        ({"demand": np.array([np.nan])}, "demand: got [nan], expected finite counts"),
        ({"bin_s": 0.0}, "bin_s: got 0.0, expected seconds above 0"),
        ({"mu": 0.0}, "mu: got 0.0, expected requests per second above 0"),
        ({"lead_s": -1.0}, "lead_s: got -1.0"),
        ({"attainment": 99.0}, "attainment: got 99.0, expected a fraction"),
        ({"wait_s": float("nan")}, "wait_s: got nan"),
        ({"least": -1}, "least: got -1"),
        ({"least": 3, "most": 2}, "most: got 2, expected at least 3"),
    ],
)
def test_figures_that_make_no_problem_are_refused(wrong: dict[str, object], said: str) -> None:
    right = {"demand": np.array([1.0]), "bin_s": 1.0, "mu": 1.0}
    with pytest.raises(ValueError) as refused:
        Problem(**{**right, **wrong})  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_what_follows_from_the_figures() -> None:
    asked = problem([10, 20, 0], lead_s=7.0, attainment=0.9, wait_s=9.9)
    assert asked.load.tolist() == [1.0, 2.0, 0.0]
    assert asked.ends_at == 15.0
    assert asked.spare == pytest.approx(0.3)
    assert asked.waits == 1  # whole bins of 5 s
    assert asked.start_s.tolist() == [0.0, 5.0, 7.0]


def test_instants_are_counted_by_bin() -> None:
    at = np.array([0.0, 9.9, 10.0, 12.0, 14.9, 15.0, 30.0])
    assert bin_arrivals(at, 5.0, 10.0, 22.0).tolist() == [3.0, 1.0, 0.0]
