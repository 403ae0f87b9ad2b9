"""Verification of a plan: it must meet the SLO when it is simulated, not only in the fluid model.

What the fluid leaves and what a replica misses at ``mu`` add up, so a plan that spends the whole allowance in
the fluid misses more than it may. So the fluid gets a part of it, as large as the twin's runs bear.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sim.oracle.clairvoyant import clairvoyant
from sim.oracle.integer_plan import Plan
from sim.oracle.problem import Problem

# The allowance of the fluid is found to this, a fraction of the requests.
PRECISION = 0.0005


@dataclass(frozen=True, slots=True)
class VerifiedPlan:
    """A ``plan`` whose run met the SLO; ``fluid`` is the fraction of requests that the fluid model serves."""

    plan: Plan
    attained: float
    fluid: float


def verify(problem: Problem, run: Callable[[Plan], float]) -> VerifiedPlan:
    """The plan for ``problem`` with which ``run`` (plan to attainment) attains ``problem.attainment``.

    By bisection over what the fluid may leave, of which the plan of the whole allowance is tried first.
    Raises :class:`ValueError` where a plan that leaves nothing still misses, and
    :class:`policy.errors.TargetError` where ``most`` replicas cannot serve that much.
    """

    def tried(fluid: float) -> VerifiedPlan:
        plan = clairvoyant(replace(problem, attainment=fluid))
        return VerifiedPlan(plan, run(plan), fluid)

    promised = problem.attainment
    best = tried(promised)
    if best.attained >= promised:
        return best
    best = tried(1.0)
    if best.attained < promised:
        raise ValueError(
            f"a plan that serves all of the fluid attains {best.attained:.4g}, expected {promised:g}: "
            "take shorter bins, or a smaller mu"
        )
    low = promised
    while best.fluid - low > PRECISION:
        found = tried((low + best.fluid) / 2)
        if found.attained >= promised:
            best = found
        else:
            low = found.fluid
    return best
