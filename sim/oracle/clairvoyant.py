"""A plan to run, made by who knows the future: whole replicas, started in time, stopped when it pays.

What may wait is spread over the bins for which it may wait, ``1 - attainment`` of all is left where that
saves most (:mod:`sim.oracle.dropped_demand`), and the rest is served in layers
(:mod:`sim.oracle.integer_plan`). :class:`Clairvoyant` asks for the plan as a policy, so that the twin tries
what the fluid promises.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policy.errors import TargetError
from policy.scaling.view import Proposal, View
from sim.oracle.dropped_demand import served_demand
from sim.oracle.integer_plan import Plan, dropped, plan_layers
from sim.oracle.problem import ROUNDING, Problem
from sim.twin.record import Floats


def clairvoyant(problem: Problem) -> Plan:
    """The plan; raises :class:`policy.errors.TargetError` where ``most`` replicas cannot serve enough."""
    load = _spread(problem.load, problem.waits)
    needs = served_demand(load, problem)
    if dropped(load, needs) > problem.spare + ROUNDING * problem.bins:
        wanted = f"{problem.attainment:g} of the requests"
        raise TargetError(
            f"{problem.most} replicas of {problem.mu:g} requests per second cannot serve {wanted}"
        )
    return plan_layers(needs, problem.bin_s, problem.lead_s)


class Clairvoyant:
    """The plan as a scaling policy, of a run in which the plan begins at the instant ``began_at``."""

    def __init__(self, plan: Plan, began_at: float = 0.0) -> None:
        self._plan = plan
        self._began_at = began_at

    def decide(self, view: View, memory: Any) -> Proposal:
        """The most that the plan has until the next decision, so that no start is late for the tick."""
        planned = self._plan.most_within(view.at - self._began_at, view.tick_s)
        count = max(view.least, min(planned, view.most))
        return Proposal(count=count, reason=f"{planned} as planned", terms={"planned": planned}, fixed=True)


def _spread(load: Floats, bins: int) -> Floats:
    """The load when each bin's is served in equal parts in itself and in the next ``bins``."""
    total = np.concatenate([np.zeros(bins + 1), np.cumsum(load)])
    return np.diff(np.convolve(total, np.full(bins + 1, 1.0 / (bins + 1)), mode="valid")) if bins else load
