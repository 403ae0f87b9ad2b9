"""The clairvoyant plan: the cheapest replica counts for a demand that is known in advance.

Demand is spread over the bins in which a request may wait. ``1 - attainment`` of it is dropped where that
saves most. The rest is served by whole replicas in layers: layer ``k`` holds a replica while at least ``k``
are needed. A gap of ``g`` seconds in a layer costs ``g`` if the replica stays and the start-up time ``L`` if
it is stopped and started again, so it stays iff ``g <= L``. Layers are independent, so no plan for the same
needs costs less.

Dropping is a Lagrangian relaxation with a greedy repair. With a price on dropped load each layer decides by
dynamic programming over the bins: on costs the bin, off costs the price of what it drops, off to on costs the
start-up time. The lowest price that drops no more than is allowed is searched for. What remains of the
allowance goes, top layer first and in order of time, to stretches that the next lower price would drop too.
Where stretches are much smaller than the allowance this is near the optimum, which
:mod:`sim.oracle.linear_program` bounds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policy.scaling.view import Proposal, View
from sim.oracle.provisioning_problem import ROUNDING, ProvisioningProblem
from sim.simulator.run_record import Floats, Ints


@dataclass(frozen=True, slots=True)
class ReplicaCountPlan:
    """The replica count from each of the instants ``at`` (seconds) on, starting replicas included.

    The first instant is 0. ``replica_s`` are the replica-seconds until ``ends_at``, start-up times included.
    """

    at: tuple[float, ...]
    counts: tuple[int, ...]
    ends_at: float
    replica_s: float

    @property
    def mean(self) -> float:
        return self.replica_s / self.ends_at

    def most_within(self, at: float, for_s: float) -> int:
        """The highest replica count from ``at`` until before ``for_s`` seconds later."""
        first = max(0, bisect_right(self.at, at) - 1)
        return max(self.counts[first : max(first + 1, bisect_left(self.at, at + for_s))])


def plan_layers(needs: Ints, bin_s: float, lead_s: float) -> ReplicaCountPlan:
    """The cheapest plan that has ``needs`` replicas ready in each bin of ``bin_s`` seconds."""
    changes: Counter[float] = Counter({0.0: 0})
    for layer in range(1, int(needs.max()) + 1):
        for begins, ends in _stays(needs >= layer, bin_s, lead_s):
            changes[begins] += 1
            changes[ends] -= 1
    ends_at = len(needs) * bin_s
    at = sorted(instant for instant in changes if instant < ends_at)
    counts = np.cumsum([changes[instant] for instant in at])
    return ReplicaCountPlan(
        at=tuple(at),
        counts=tuple(int(count) for count in counts),
        ends_at=ends_at,
        replica_s=replica_seconds(needs, bin_s, lead_s),
    )


def replica_seconds(needs: Ints, bin_s: float, lead_s: float) -> float:
    """Replica-seconds of the cheapest plan: the needs, and ``min(g, L)`` for each gap."""
    layers = np.arange(int(needs.max()))[:, None]
    row, begins = np.nonzero(np.diff(needs > layers, axis=1, prepend=False) & (needs > layers))
    _, ends = np.nonzero(np.diff(needs > layers, axis=1, append=False) & (needs > layers))
    # Before the first stretch of a layer the gap is from 0 on.
    before = np.where(np.diff(row, prepend=-1) > 0, 0, np.roll(ends + 1, 1))
    gaps = np.minimum((begins - before) * bin_s, lead_s)
    return float(needs.sum() * bin_s + gaps.sum())


def dropped(load: Floats, needs: Ints) -> float:
    """The part of ``load`` (in full replicas) beyond ``needs`` replicas, in replicas times bins."""
    return float(np.maximum(load - needs, 0.0).sum())


def _stays(needed: NDArray[np.bool_], bin_s: float, lead_s: float) -> list[tuple[float, float]]:
    """The spans in which a layer is held: from ``lead_s`` before the need, through gaps of up to that."""
    edges = np.flatnonzero(np.diff(needed, prepend=False, append=False)) * bin_s
    held: list[tuple[float, float]] = []
    for begins, ends in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        before = held[-1][1] if held else 0.0
        if begins - before <= lead_s + ROUNDING:
            held[-1:] = [(held[-1][0] if held else 0.0, ends)]
        else:
            held.append((begins - lead_s, ends))
    return held


# Prices per round, and rounds; each searches between the two prices next to the right one.
_PRICES = 32
_ROUNDS = 4
# An upper bound of useful prices, in replicas kept for a whole start-up per request.
_HIGHEST = 1e9


def served_demand(load: Floats, problem: ProvisioningProblem) -> Ints:
    """Replicas needed in each bin for ``load`` (in full replicas), less what may be dropped."""
    whole = np.maximum(np.ceil(load - ROUNDING).astype(np.int64), problem.least)
    if problem.most is not None:
        whole = np.minimum(whole, problem.most)
    # Bounds or rounding may have left some already.
    if dropped(load, whole) >= problem.spare - ROUNDING:
        return whole
    more, fewer = whole, np.full(problem.bins, problem.least)
    if dropped(load, fewer) <= problem.spare:
        return fewer
    low, high = problem.bin_s / 2, _HIGHEST * (problem.bin_s + problem.lead_s)
    for _ in range(_ROUNDS):
        prices = np.geomspace(low, high, _PRICES)
        tried = _at_prices(load, whole, problem, prices)
        enough = [index for index, needs in enumerate(tried) if dropped(load, needs) <= problem.spare]
        first = enough[0] if enough else len(prices)
        if first < len(prices):
            more, high = tried[first], float(prices[first])
        if first:
            fewer, low = tried[first - 1], float(prices[first - 1])
    return _repaired(load, more, fewer, problem)


def _at_prices(load: Floats, whole: Ints, problem: ProvisioningProblem, prices: Floats) -> list[Ints]:
    """The needs at each price, in replica-seconds per replica-bin of dropped load."""
    layers = np.arange(problem.least, int(whole.max()))
    left = np.clip(load[:, None] - layers, 0.0, 1.0)
    on = _on(left, problem.bin_s, problem.start_s, prices)
    return [problem.least + on[:, index].sum(axis=1) for index in range(len(prices))]


def _on(left: Floats, bin_s: float, start_s: Floats, prices: Floats) -> NDArray[np.bool_]:
    """By bin, price and layer whether the layer is on; ``left`` is what off drops. A tie keeps it on."""
    bins, layers = left.shape
    slack = ROUNDING * bin_s
    stays = np.zeros((bins, len(prices), layers), dtype=np.bool_)
    stops = np.zeros_like(stays)
    on = np.full((len(prices), layers), bin_s)
    off = prices[:, None] * left[0]
    for at in range(1, bins):
        again = off + start_s[at]
        stays[at] = on <= again + slack
        stops[at] = on < off
        on, off = np.minimum(on, again) + bin_s, np.minimum(on, off) + prices[:, None] * left[at]
    found = np.zeros_like(stays)
    now = on <= off
    for at in range(bins - 1, -1, -1):
        found[at] = now
        now = np.where(now, stays[at], stops[at])
    return found


def _repaired(load: Floats, more: Ints, fewer: Ints, problem: ProvisioningProblem) -> Ints:
    """``more`` without the stretches that ``fewer`` lacks, where they fit and save replica-seconds."""
    needs, cost = more, replica_seconds(more, problem.bin_s, problem.lead_s)
    for layer in range(int(more.max()), problem.least, -1):
        edges = np.flatnonzero(np.diff((more >= layer) & (fewer < layer), prepend=False, append=False))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            trial = needs.copy()
            trial[begin:end] = np.minimum(trial[begin:end], np.maximum(layer - 1, fewer[begin:end]))
            if dropped(load, trial) > problem.spare:
                continue
            less = replica_seconds(trial, problem.bin_s, problem.lead_s)
            if less < cost:
                needs, cost = trial, less
    return needs


def clairvoyant(problem: ProvisioningProblem) -> ReplicaCountPlan:
    """The plan; raises :class:`policy.errors.TargetError` where ``most`` replicas cannot serve enough."""
    load = _spread(problem.load, problem.waits)
    needs = served_demand(load, problem)
    if dropped(load, needs) > problem.spare + ROUNDING * problem.bins:
        raise problem.infeasible()
    return plan_layers(needs, problem.bin_s, problem.lead_s)


class ClairvoyantPolicy:
    """A plan as a scaling policy; the plan begins with the run."""

    def __init__(self, plan: ReplicaCountPlan) -> None:
        self._plan = plan

    def decide(self, view: View, memory: Any) -> Proposal:
        """The highest planned count until the next decision, so that no start is late for the tick."""
        planned = self._plan.most_within(view.at, view.tick_s)
        count = max(view.least, min(planned, view.most))
        return Proposal(count=count, reason=f"{planned} as planned", terms={"planned": planned}, fixed=True)


def _spread(load: Floats, bins: int) -> Floats:
    """The load when each bin's is served in equal parts in itself and in the next ``bins``."""
    total = np.concatenate([np.zeros(bins + 1), np.cumsum(load)])
    return np.diff(np.convolve(total, np.full(bins + 1, 1.0 / (bins + 1)), mode="valid")) if bins else load


# Precision of the bisection in :func:`verify`, a fraction of the requests.
PRECISION = 0.0005


@dataclass(frozen=True, slots=True)
class VerifiedPlan:
    """A ``plan`` whose run met the SLO; ``fluid`` is the fraction of requests that the fluid model serves."""

    plan: ReplicaCountPlan
    attained: float
    fluid: float


def verify(problem: ProvisioningProblem, run: Callable[[ReplicaCountPlan], float]) -> VerifiedPlan:
    """The plan for ``problem`` with which ``run`` (plan to attainment) attains ``problem.attainment``.

    What the fluid drops and what replicas miss at ``mu`` add up, so the fluid may use only a part of the
    allowance: the largest part that still attains, by bisection; the whole allowance is tried first. Raises
    :class:`ValueError` where a plan that drops nothing still misses, and
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
