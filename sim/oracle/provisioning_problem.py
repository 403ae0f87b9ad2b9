"""The problem of the offline optimum: the demand over time, and the capacity per replica.

Requests are divisible and alike. A replica serves ``mu`` per second, is ready exactly ``lead_s`` after its
start, and holds its GPUs from start to stop. Replicas ready at 0 were started before and cost from 0 on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from policy.errors import TargetError
from sim.simulator.run_record import Floats

# Tolerance for float rounding of counts.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProvisioningProblem:
    """``demand`` requests arrive in each bin of ``bin_s`` seconds; one replica serves ``mu`` per second.

    ``mu`` is the capacity within the SLO (:mod:`sim.oracle.replica_capacity`). A start takes ``lead_s``
    seconds. At least ``attainment`` of the requests must be served, each within ``wait_s`` seconds (rounded
    down to whole bins) of its bin; requests still waiting at the end are served after it. There are ``least``
    to ``most`` replicas at any time (``None``: unbounded).
    """

    demand: Floats
    bin_s: float
    mu: float
    least: int = 0
    most: int | None = None
    lead_s: float = 0.0
    wait_s: float = 0.0
    attainment: float = 0.99

    @property
    def bins(self) -> int:
        return len(self.demand)

    @property
    def load(self) -> Floats:
        """The demand of each bin in full replicas."""
        return self.demand / (self.mu * self.bin_s)

    @property
    def spare(self) -> float:
        """How much of the load may be dropped, in replicas times bins."""
        return (1.0 - self.attainment) * float(self.load.sum())

    @property
    def waits(self) -> int:
        """How many bins a request may wait."""
        return min(int(self.wait_s / self.bin_s + ROUNDING), self.bins)

    @property
    def start_s(self) -> Floats:
        """The cost of a start, in replica-seconds, by the bin at whose beginning the replica is ready.

        A replica ready before ``lead_s`` was started before 0 and costs from 0 on.
        """
        ahead = self.bin_s * np.arange(self.bins, dtype=np.float64)
        return np.minimum(ahead, self.lead_s)

    def infeasible(self) -> TargetError:
        """The error that ``most`` replicas cannot serve enough."""
        return TargetError(f"{self.most} replicas cannot serve {self.attainment:g} of the demand")


def bin_arrivals(at: Floats, bin_s: float, since: float, until: float) -> Floats:
    """How many of the instants ``at`` fall in each bin of ``bin_s`` seconds, from ``since`` to ``until``."""
    bins = math.ceil((until - since) / bin_s - ROUNDING)
    inside = at[(at >= since) & (at < until)]
    places = np.minimum(((inside - since) / bin_s).astype(np.int64), bins - 1)
    return np.bincount(places, minlength=bins).astype(np.float64)
