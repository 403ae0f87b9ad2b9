"""The lower bound of replica-seconds: a linear program with fractional replicas and known demand.

Over the bins ``t``, with the demand ``a`` in full replicas, ``n`` ready replicas, ``u`` newly ready ones,
``d`` dropped and ``q`` left waiting at the end of the bin:

    least    sum of bin_s n_t + min(L, t bin_s) u_t
    where    n_t - n_(t-1) <= u_t                                 newly ready replicas were started L before
             q_t >= q_(t-1) + a_t - d_t - n_t                     load neither served nor dropped waits
             q_t <= sum of a_k - d_k over the last W bins         for W bins at most
             sum of d_t <= (1 - attainment) sum of a_t

Every plan of whole replicas that serves as much is a solution, so none costs less. Solved by HiGHS
(Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import block_array, coo_array, diags_array, eye_array

from sim.oracle.provisioning_problem import ProvisioningProblem
from sim.simulator.run_record import Floats

_INFEASIBLE = 2


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaTimeBound:
    """``replica_s`` is the least number of replica-seconds, with ``ready`` replicas in each bin.

    ``dropped`` are requests, by the bin in which they arrive.
    """

    replica_s: float
    ready: Floats
    dropped: Floats


def lower_bound(problem: ProvisioningProblem, lasts_s: float | None = None) -> ReplicaTimeBound:
    """The optimum; raises :class:`policy.errors.TargetError` where ``most`` replicas cannot serve enough.

    A run that may be over after ``lasts_s`` seconds, within the last bin, pays only for that part of the bin.
    """
    bins, load = problem.bins, problem.load
    one = eye_array(bins)
    step = diags_array([np.ones(bins), -np.ones(bins - 1)], offsets=[0, -1], shape=(bins, bins))
    # The arrivals that may still wait at the end of a bin are those of the last few.
    recent = sum((eye_array(bins, k=-k) for k in range(problem.waits)), start=coo_array((bins, bins)))
    rows = [
        [step, -one, None, None],
        [-one, None, -one, -step],
        [None, None, recent, one],
        [None, None, coo_array(np.ones((1, bins))), None],
    ]
    limits = np.concatenate([np.zeros(bins), -load, (recent @ load[:, None])[:, 0], [problem.spare]])
    held_s = np.full(bins, problem.bin_s)
    if lasts_s is not None:
        held_s[-1] = lasts_s - (bins - 1) * problem.bin_s
    cost = np.concatenate([held_s, problem.start_s, np.zeros(2 * bins)])
    lows = np.concatenate([np.full(bins, float(problem.least)), np.zeros(3 * bins)])
    highs = np.full(4 * bins, np.inf)
    if problem.most is not None:
        highs[:bins] = problem.most
    highs[2 * bins : 3 * bins] = load
    found = linprog(
        cost,
        A_ub=block_array(rows, format="csr"),
        b_ub=limits,
        bounds=np.column_stack([lows, highs]),
        method="highs",
    )
    if found.status == _INFEASIBLE:
        raise problem.infeasible()
    if found.x is None:
        raise RuntimeError(f"the linear program was not solved: {found.message}")
    ready, _, dropped, _ = np.split(found.x, 4)
    return ReplicaTimeBound(float(found.fun), ready, dropped * problem.mu * problem.bin_s)
