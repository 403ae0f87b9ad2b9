"""Small problems for the oracle, and their optimum by brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import strategies as st

from sim.oracle.clairvoyant import dropped, replica_seconds
from sim.oracle.provisioning_problem import ProvisioningProblem

# In tenths of a full replica, of bins of 5 s.
LOADS = st.lists(st.integers(0, 30), min_size=1, max_size=6)
LEADS = st.sampled_from([0.0, 3.0, 5.0, 10.0, 17.0])
ATTAINED = st.sampled_from([1.0, 0.99, 0.9, 0.6])


def problem(
    tenths: list[int],
    lead_s: float = 0.0,
    attainment: float = 1.0,
    wait_s: float = 0.0,
    *,
    least: int = 0,
    most: int | None = None,
) -> ProvisioningProblem:
    return ProvisioningProblem(
        demand=np.array(tenths, dtype=np.float64),
        bin_s=5.0,
        mu=2.0,
        lead_s=lead_s,
        attainment=attainment,
        wait_s=wait_s,
        least=least,
        most=most,
    )


def cheapest(asked: ProvisioningProblem) -> float:
    """The replica-seconds of the best plan of whole replicas, by brute force, without waiting."""
    choices = range(asked.least, int(np.ceil(asked.load.max())) + 1 + asked.least)
    plans = (np.array(needs) for needs in product(choices, repeat=asked.bins))
    return min(
        replica_seconds(needs, asked.bin_s, asked.lead_s)
        for needs in plans
        if dropped(asked.load, needs) <= asked.spare + 1e-9
    )
