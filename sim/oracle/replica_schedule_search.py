"""A search for the cheapest schedule of replica counts, by runs of the simulator, with the trace known.

First fluid plans at several multiples of ``mu`` (:mod:`sim.oracle.clairvoyant`) bracket what a replica takes
on this trace: large pools take more together, and cached prefixes multiply it. The capacity differs along
the trace too, so later schedules are spliced: each run says what each window of its schedule cost and how
many requests missed the SLO there, and dynamic programming takes for each window the best of all runs at one
price of a missed request. What waits at the end of a window delays the next one, so a splice can miss more
than its parts; then the next one is allowed fewer. A splice that has run already is followed by a trim: the
cheapest schedule that attains the target with one replica less in some of its spans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.oracle.clairvoyant import ReplicaCountPlan, plan_layers, served_demand
from sim.oracle.provisioning_problem import ProvisioningProblem
from sim.simulator.run_record import Floats, Ints

# The first multiple of ``mu``, and the steps up and down until one attains the target and another does not.
FIRST, UP, DOWN = 1.2, 1.5, 1 / 1.3
# Fluid plans, the first runs of a search; there are more only until they bracket the target. The search of
# the bracket stops when it is narrower than this ratio.
FLUID = 6
NEAR = 1.015
# About the time in which a queue builds up and clears.
WINDOW_S = 60.0
# The part of the allowance that splices are planned with: the first, the least, and the step up.
START_PART, LEAST_PART, MORE = 0.5, 0.3, 1.15
# Bisections of the price of a missed request, in replica-seconds, between these.
_BISECTIONS, _CHEAP, _DEAR = 30, 1e-3, 1e5


class ScheduleEvaluation(NamedTuple):
    """A run of a plan: requests that ``missed`` the SLO by the bin of their arrival, and the two figures that
    the target is about.
    """

    missed: Floats
    attainment: float
    replica_s: float


@dataclass(frozen=True, slots=True, eq=False)
class EvaluatedSchedule:
    """``needs`` ready replicas in each bin, and how they ran; ``mu`` is ``None`` but for fluid plans."""

    needs: Ints
    run: ScheduleEvaluation
    mu: float | None = None


def search(
    problem: ProvisioningProblem,
    run: Callable[[ReplicaCountPlan], ScheduleEvaluation],
    runs: int,
    judged_from: int = 0,
) -> list[EvaluatedSchedule]:
    """At most ``runs`` schedules that were run, in that order.

    The target counts requests from bin ``judged_from`` on. What ``run`` says must agree: with less than the
    target as ``attainment``, some of these requests are ``missed``.
    """
    tried: list[EvaluatedSchedule] = []

    def ran(needs: Ints, mu: float | None = None) -> EvaluatedSchedule:
        found = EvaluatedSchedule(needs, run(plan_layers(needs, problem.bin_s, problem.lead_s)), mu)
        tried.append(found)
        return found

    low, high = 0.0, math.inf
    while len(tried) < runs and (not low or math.isinf(high) or len(tried) < FLUID) and high > NEAR * low:
        factor = _next_factor(low, high)
        needs = _fluid(problem, factor)
        found = _same(tried, needs)
        if found is None:
            found = ran(needs, factor * problem.mu)
        elif (low and math.isfinite(high)) or _last(problem, factor, needs, up=low > 0):
            break
        if found.run.attainment >= problem.attainment:
            low = factor
        else:
            high = factor
    windows = Windows(problem, judged_from)
    trims = _spans(problem)
    part = START_PART
    while len(tried) < runs:
        needs = windows.splice(tried, part * windows.allowed)
        if _same(tried, needs) is None:
            judged = ran(needs).run
            if judged.attainment >= problem.attainment:
                part = min(1.0, MORE * part)
            else:
                missed = windows.missed(judged)
                part = max(LEAST_PART, part * min(0.9, windows.allowed / missed))
            continue
        enough = [each for each in tried if each.run.attainment >= problem.attainment]
        if not enough:
            break
        best = min(enough, key=lambda each: each.run.replica_s).needs
        fewer = np.maximum(best - 1, problem.least)
        trimmed = (np.where(span, fewer, best) for span in trims)
        fresh = next((needs for needs in trimmed if _same(tried, needs) is None), None)
        if fresh is None:
            break
        ran(fresh)
    return tried


def _next_factor(low: float, high: float) -> float:
    if math.isinf(high):
        return UP * low if low else FIRST
    return math.sqrt(low * high) if low else DOWN * high


def _fluid(problem: ProvisioningProblem, factor: float) -> Ints:
    """The needs at ``factor`` times ``mu``; the fluid drops half of the allowance, replicas miss the rest."""
    asked = replace(problem, mu=factor * problem.mu, attainment=(1.0 + problem.attainment) / 2)
    return served_demand(asked.load, asked)


def _last(problem: ProvisioningProblem, factor: float, needs: Ints, *, up: bool) -> bool:
    """Whether further steps from ``factor`` have the same needs: one replica at most, or all there are."""
    if up:
        return float(problem.load.max()) <= factor * max(1, problem.least)
    most = math.inf if problem.most is None else problem.most
    return bool(np.all((needs >= most) | (problem.demand == 0)))


def _same(tried: Sequence[EvaluatedSchedule], needs: Ints) -> EvaluatedSchedule | None:
    return next((each for each in tried if np.array_equal(each.needs, needs)), None)


def _spans(problem: ProvisioningProblem) -> Iterator[NDArray[np.bool_]]:
    """Every second span, then every fourth and so on; shorter spans than twice a start save nothing."""
    bins = max(1, math.ceil(max(WINDOW_S, 2 * problem.lead_s) / problem.bin_s))
    numbers = np.arange(problem.bins) // bins
    for power in count(1):
        every = 2**power
        for phase in range(every):
            yield numbers % every == phase
        if every > numbers[-1]:
            return


class Windows:
    """The windows in which schedules are spliced."""

    def __init__(self, problem: ProvisioningProblem, judged_from: int) -> None:
        self._problem = problem
        self._length = max(1, round(WINDOW_S / problem.bin_s))
        self._starts = np.arange(0, problem.bins, self._length)
        self._judged_from = judged_from
        self.allowed = (1.0 - problem.attainment) * float(problem.demand[judged_from:].sum())

    def missed(self, run: ScheduleEvaluation) -> float:
        return float(run.missed[self._judged_from :].sum())

    def splice(self, tried: Sequence[EvaluatedSchedule], allowed: float) -> Ints:
        """The cheapest needs of windows of ``tried`` that together miss at most ``allowed`` requests.

        Those of the highest price where none does.
        """
        needs, missed = (
            np.array([each.needs for each in tried]),
            np.array([each.run.missed for each in tried]),
        )
        lead_s, bin_s = self._problem.lead_s, self._problem.bin_s
        rises = np.maximum(np.diff(needs, axis=1, prepend=needs[:, :1]), 0)
        rises[:, self._starts] = 0
        held_s = np.add.reduceat(bin_s * needs + lead_s * rises, self._starts, axis=1)
        # A start for each replica more than before, and half a bin so that equal schedules do not alternate.
        first, last = needs[:, self._starts[1:]], needs[:, self._starts[1:] - 1]
        changes_s = lead_s * np.maximum(first[None] - last[:, None], 0)
        changes_s += bin_s / 2 * ~np.eye(len(tried), dtype=np.bool_)[:, :, None]
        # Misses before the judged bins are not allowed for, but have the price: without it hardly a replica
        # would be held there, and the judged bins would begin with a queue.
        lost = np.add.reduceat(missed, self._starts, axis=1)
        missed[:, : self._judged_from] = 0.0
        judged = np.add.reduceat(missed, self._starts, axis=1)
        columns = np.arange(len(self._starts))
        low, high = _CHEAP, _DEAR
        best = cheapest_path(held_s + high * lost, changes_s)
        for _ in range(_BISECTIONS):
            price = math.sqrt(low * high)
            path = cheapest_path(held_s + price * lost, changes_s)
            if judged[path, columns].sum() <= allowed:
                best, high = path, price
            else:
                low = price
        bins = np.arange(self._problem.bins)
        return np.asarray(needs[best[bins // self._length], bins])


def cheapest_path(costs: Floats, changes: Floats) -> Ints:
    """The row of ``costs`` in each column; ``changes`` (from, to) are before each column but the first."""
    total, backs = costs[:, 0], []
    for column in range(1, costs.shape[1]):
        reached = total[:, None] + changes[:, :, column - 1]
        backs.append(reached.argmin(axis=0))
        total = reached.min(axis=0) + costs[:, column]
    path = [int(total.argmin())]
    for back in reversed(backs):
        path.append(int(back[path[-1]]))
    return np.array(path[::-1])
