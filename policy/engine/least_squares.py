"""Least squares for the engine model: five coefficients of 0 or more, near a prior where unsure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec

from policy.engine.performance_model import EngineModel
from policy.engine.step_samples import StepSample

ROUNDS = 6
# Weight of the prior of a coefficient, relative to one load point.
_HOLD = 1e-3
# Relative residuals above this count linearly (Huber).
_HUBER = 0.08
_ENOUGH = 1e-4
Vector = list[float]


def fit(points: Sequence[StepSample], prior: EngineModel, *starts: EngineModel) -> EngineModel:
    """The coefficients with the smallest relative errors over ``points``, of equal weight.

    The soft maximum is homogeneous in w and c: at a given ratio of the two it is linear in both, so linear
    fits that use the last ratio converge, from each of ``starts``. Outliers are weighed down by Huber's rule.
    Where the points do not determine a coefficient it stays at ``prior``.
    """
    held = _coefficients(prior)
    units = [_unit(i, each, points) for i, each in enumerate(held)]
    tried = [_alternate(points, _coefficients(start), held, units, prior.p) for start in starts or (prior,)]
    o, w, c, g, r = min(tried, key=lambda each: _loss(points, each, held, units, prior.p))
    return msgspec.structs.replace(prior, o=o if o + w > 0.0 else 1e-6, w=w, c=c, g=g, r=r)


def with_knee(model: EngineModel, tokens: float) -> EngineModel:
    """The same model with its knee, where computing takes as long as reading the weights, at ``tokens``."""
    return msgspec.structs.replace(model, c=max(model.w, model.o) / tokens, w=max(model.w, model.o))


def _coefficients(model: EngineModel) -> Vector:
    return [model.o, model.w, model.c, model.g, model.r]


def _alternate(points: Sequence[StepSample], start: Vector, held: Vector, units: Vector, p: float) -> Vector:
    """Linear fits, each at the knee of the one before."""
    found = start
    for _ in range(ROUNDS):
        rows = [_row(point, found, p) for point in points]
        residuals = [_residual(row, found, point) for row, point in zip(rows, points, strict=True)]
        weights = [1.0 if each <= _HUBER else _HUBER / each for each in residuals]
        solved = _linear(rows, points, weights, units, held)
        # Half of the way damps the alternation where the knee is hardly seen.
        last, found = found, [(a + b) / 2 for a, b in zip(found, solved, strict=True)]
        if all(abs(a - b) <= _ENOUGH * u for a, b, u in zip(last, found, units, strict=True)):
            break
    return found


def _residual(row: Vector, at: Vector, point: StepSample) -> float:
    predicted = sum(a * b for a, b in zip(row, at, strict=True))
    return abs(predicted / point.seconds - 1.0)


def _loss(points: Sequence[StepSample], at: Vector, held: Vector, units: Vector, p: float) -> float:
    """Huber's loss plus the weight of the prior."""
    far = [_residual(_row(point, at, p), at, point) for point in points]
    loss = sum(each**2 if each <= _HUBER else _HUBER * (2 * each - _HUBER) for each in far)
    return loss + _HOLD * sum(((a - b) / u) ** 2 for a, b, u in zip(at, held, units, strict=True))


def _unit(index: int, value: float, points: Sequence[StepSample]) -> float:
    """The scale of a coefficient: its prior, or what makes a tenth of a step."""
    rows = [_features(point)[index] / point.seconds for point in points]
    return max(value, 0.1 / max(sum(rows) / len(rows), 1e-12))


def _features(point: StepSample) -> Vector:
    return [1.0, 1.0, point.tokens, point.kv_tokens, point.running]


def _row(point: StepSample, at: Sequence[float], p: float) -> Vector:
    """The partial derivatives of the step time by coefficient, at ``at``."""
    w, cn = at[1], at[2] * point.tokens
    row = _features(point)
    top = max(w, cn)
    if top > 0.0:
        linear = top * (1.0 + (min(w, cn) / top) ** p) ** (1.0 / p)
        row[1] *= (w / linear) ** (p - 1.0)
        row[2] *= (cn / linear) ** (p - 1.0)
    return row


def _linear(
    rows: Sequence[Vector],
    points: Sequence[StepSample],
    weights: Sequence[float],
    units: Sequence[float],
    held: Sequence[float],
) -> Vector:
    """Weighted least squares over coefficients that are no less than 0, in their own units."""
    size = len(units)
    normal = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    for row, point, weight in zip(rows, points, weights, strict=True):
        relative = [a * u / point.seconds for a, u in zip(row, units, strict=True)]
        for i in range(size):
            share = weight * relative[i]
            right[i] += share
            for j in range(size):
                normal[i][j] += share * relative[j]
    for i in range(size):
        normal[i][i] += _HOLD
        right[i] += _HOLD * held[i] / units[i]
    return [x * u for x, u in zip(_non_negative(normal, right), units, strict=True)]


def _non_negative(normal: Sequence[Vector], right: Vector) -> Vector:
    """The best of the solutions that leave some coefficients at 0 and have the others above it.

    The minimum is unique, and there are only 31 choices. Most often it is the first, of all coefficients.
    """
    size = len(right)
    found, gain = [0.0] * size, 0.0
    for count in range(size, 0, -1):
        for free in combinations(range(size), count):
            solved = _solve([[normal[i][j] for j in free] for i in free], [right[i] for i in free])
            reached = sum(right[i] * value for i, value in zip(free, solved, strict=True))
            if min(solved) > 0.0 and reached > gain:
                gain = reached
                found = [0.0] * size
                for i, value in zip(free, solved, strict=True):
                    found[i] = value
        if gain and count == size:
            break
    return found


def _solve(matrix: list[Vector], right: Vector) -> Vector:
    """Gauss' elimination of a matrix that is positive definite."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found
