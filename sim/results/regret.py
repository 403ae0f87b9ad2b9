"""Where the GPU time of a policy goes beyond the least: what it did not foresee, starts, and whole replicas.

From the lower bound to the policy in three steps, each of which takes away one freedom:

    integrality   the plan of whole replicas without a lead, less the fractions without a lead
    lead          the plan with the lead, less the plan without
    forecast      the policy's run, less the plan with the lead

They sum to the policy's seconds less the bound *without* a lead: the bound with one has a part of the lead's
price in it already. In which order the freedoms are taken away is a convention. ``forecast`` is all that a
better policy could still save, what safety rules and ticks hold back included, and may be negative of a run
that attains less than the plan.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from sim.oracle.clairvoyant import clairvoyant
from sim.oracle.linear_program import lower_bound
from sim.oracle.problem import Problem


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """The three parts, in seconds of replicas, and what they are measured from.

    ``fluid_s`` is the bound without a lead. ``lower_s`` and ``achievable_s`` are the bound and the plan with
    it.
    """

    forecast_s: float
    lead_s: float
    integrality_s: float
    fluid_s: float
    lower_s: float
    achievable_s: float


def split(policy_s: float, problem: Problem) -> Regret:
    """The regret of a run that took ``policy_s`` seconds of replicas, starts and drains included.

    Raises :class:`policy.errors.TargetError` where no plan can serve enough.
    """
    at_once = replace(problem, lead_s=0.0)
    fluid_s, lower_s = lower_bound(at_once).replica_s, lower_bound(problem).replica_s
    at_once_s, achievable_s = clairvoyant(at_once).replica_s, clairvoyant(problem).replica_s
    return Regret(
        forecast_s=policy_s - achievable_s,
        lead_s=achievable_s - at_once_s,
        integrality_s=at_once_s - fluid_s,
        fluid_s=fluid_s,
        lower_s=lower_s,
        achievable_s=achievable_s,
    )
