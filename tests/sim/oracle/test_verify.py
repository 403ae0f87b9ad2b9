"""The fluid's allowance is what runs bear of it, here with replicas that always miss a part of their own."""

from __future__ import annotations

import numpy as np
import pytest

from sim.oracle.clairvoyant import PRECISION, Plan, clairvoyant, verify
from sim.oracle.problem import Problem

ASKED = Problem(
    demand=np.random.default_rng(2).poisson(100.0, 200).astype(np.float64), bin_s=5.0, mu=2.0, attainment=0.98
)


def served(plan: Plan) -> float:
    """What of the fluid is served: without a lead a plan has just what each bin needs."""
    ready = np.array([plan.count_at(ASKED.bin_s * index) for index in range(ASKED.bins)])
    return float(np.minimum(ASKED.load, ready).sum() / ASKED.load.sum())


def test_a_plan_that_holds_is_taken_as_it_is() -> None:
    found = verify(ASKED, served)
    assert found.plan == clairvoyant(ASKED)
    assert found.fluid == 0.98
    assert found.attained == served(found.plan) >= 0.98


def test_what_replicas_miss_is_taken_off_what_the_fluid_may_leave() -> None:
    found = verify(ASKED, lambda plan: served(plan) - 0.01)
    assert found.attained >= 0.98
    assert found.fluid == pytest.approx(0.99, abs=2 * PRECISION)
    assert clairvoyant(ASKED).replica_s < found.plan.replica_s


def test_replicas_that_miss_too_much_are_refused() -> None:
    with pytest.raises(ValueError, match=r"serves all of the fluid attains 0\.97, expected 0\.98"):
        verify(ASKED, lambda plan: served(plan) - 0.03)
