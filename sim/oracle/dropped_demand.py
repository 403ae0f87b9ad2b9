"""Which requests a plan of whole replicas leaves when it may leave some: those that cost it the most.

A request in the layer ``j`` of a bin is what ``j - 1`` replicas leave of it. With a price on what is left
each layer decides for itself, by dynamic programming over the bins: on costs the bin and off the price of
what it leaves, and off to on the lead. The higher the price the less is left; the lowest one that leaves no
more than is allowed is searched for. What remains of the allowance then goes, from the top layer down and in
the order of time, to the stretches that the next lower price would have left as well, each if it fits and
saves anything. (A Lagrangian relaxation with a greedy repair: where whole stretches are much smaller than the
allowance it is near the optimum, which :mod:`sim.oracle.linear_program` bounds.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.oracle.integer_plan import dropped, replica_seconds
from sim.oracle.problem import ROUNDING, Problem
from sim.twin.record import Floats, Ints

# So many prices are tried at once, and so often between the two of them that are next to the right one.
_PRICES = 32
_ROUNDS = 4
# No price that matters is higher than this, in replicas that are kept for the whole lead for one request.
_HIGHEST = 1e9


def served_demand(load: Floats, problem: Problem) -> Ints:
    """How many replicas each bin needs for the ``load`` in full replicas, less what may be dropped."""
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


def _at_prices(load: Floats, whole: Ints, problem: Problem, prices: Floats) -> list[Ints]:
    """The needs at each of the prices, in seconds of a replica for what one does in a bin."""
    layers = np.arange(problem.least, int(whole.max()))
    left = np.clip(load[:, None] - layers, 0.0, 1.0)
    on = _on(left, problem.bin_s, problem.start_s, prices)
    return [problem.least + on[:, index].sum(axis=1) for index in range(len(prices))]


def _on(left: Floats, bin_s: float, start_s: Floats, prices: Floats) -> NDArray[np.bool_]:
    """By bin, price and layer whether the layer is on, where off leaves so much; a tie keeps it on."""
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


def _repaired(load: Floats, more: Ints, fewer: Ints, problem: Problem) -> Ints:
    """``more`` without the stretches that ``fewer`` lacks, as far as they fit and save anything."""
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
