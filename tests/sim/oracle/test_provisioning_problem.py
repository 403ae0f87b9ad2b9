"""The figures of a problem, and the bins of its demand."""

from __future__ import annotations

import numpy as np
import pytest

from sim.oracle.provisioning_problem import bin_arrivals
from tests.sim.oracle.loads import problem


def test_a_problem_has_its_load_its_allowed_drops_and_its_waits_in_bins() -> None:
    asked = problem([10, 20, 0], lead_s=7.0, attainment=0.9, wait_s=9.9)
    assert asked.load.tolist() == [1.0, 2.0, 0.0]
    assert asked.spare == pytest.approx(0.3)
    assert asked.waits == 1  # whole bins of 5 s
    assert asked.start_s.tolist() == [0.0, 5.0, 7.0]


def test_arrivals_are_counted_by_bin() -> None:
    at = np.array([0.0, 9.9, 10.0, 12.0, 14.9, 15.0, 30.0])
    assert bin_arrivals(at, 5.0, 10.0, 22.0).tolist() == [3.0, 1.0, 0.0]
