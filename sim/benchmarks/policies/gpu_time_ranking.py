"""The ranking of policies: the GPU time of each at the SLO, over the offline optimum and the lower bound.

Each policy runs at every step of a parameter sweep, which gives a Pareto front of attainment against
GPU-hours. Fronts are compared at the same attainment. A mix of two settings over time attains any mean of
them, so points are connected by straight lines.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import msgspec

from sim.benchmarks.policies.run import PLAN, PolicyTrialResult
from sim.oracle.clairvoyant import clairvoyant
from sim.oracle.linear_program import lower_bound
from sim.oracle.provisioning_problem import ProvisioningProblem
from sim.results.evaluation_metrics import Score
from sim.simulator.run_record import HOUR_S


class AttainmentPoint(NamedTuple):
    """The attainment (0..1) and the GPU-hours of one ``setting`` of a policy."""

    attainment: float
    gpu_hours: float
    setting: str = ""


def front(points: Sequence[AttainmentPoint]) -> tuple[AttainmentPoint, ...]:
    """The Pareto front, the cheapest point first."""
    best: list[AttainmentPoint] = []
    for point in sorted(points, key=lambda each: (each.gpu_hours, -each.attainment)):
        if not best or point.attainment > best[-1].attainment:
            best.append(point)
    return tuple(best)


def hours_at(points: Sequence[AttainmentPoint], attainment: float) -> float | None:
    """The fewest GPU-hours for ``attainment``, on the lines between points; ``None`` if none attains it."""
    return mixed_hours([points], attainment)


def mixed_hours(by_seed: Collection[Sequence[AttainmentPoint]], attainment: float) -> float | None:
    """The fewest mean GPU-hours with a mean of ``attainment``, from any mix of the points of each seed.

    ``None`` where no mix attains it. By duality it is the most, over prices of attainment, of what the
    cheapest points cost, less what their attainment beyond ``attainment`` is worth.
    """
    if not all(by_seed) or fmean(max(points).attainment for points in by_seed) < attainment:
        return None
    prices = {0.0}
    for points in by_seed:
        best = front(points)
        for i, low in enumerate(best):
            prices.update(
                (high.gpu_hours - low.gpu_hours) / (high.attainment - low.attainment)
                for high in best[i + 1 :]
            )
    return max(
        fmean(
            min(point.gpu_hours + price * (attainment - point.attainment) for point in points)
            for points in by_seed
        )
        for price in prices
    )


def averaged(by_seed: Mapping[int, Sequence[AttainmentPoint]]) -> tuple[AttainmentPoint, ...]:
    """The mean of each setting over the seeds, which have the same settings in the same order."""
    return tuple(
        AttainmentPoint(
            fmean(point.attainment for point in same),
            fmean(point.gpu_hours for point in same),
            same[0].setting,
        )
        for same in zip(*by_seed.values(), strict=True)
    )


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the GPU time of a policy, in replica-seconds, by their cause.

    integrality   the fluid plan of whole replicas without start-up time, less the bound without it
    lead          the fluid plan with start-up time, less that without
    forecast      the policy's run, less the offline optimum

    ``forecast`` is what a better policy could save, safety rules and ticks included. The fluid plans estimate
    what the other two are of the offline optimum.
    """

    forecast_s: float
    lead_s: float
    integrality_s: float


def split(policy_s: float, optimum_s: float, problem: ProvisioningProblem) -> Regret:
    """The regret of a run of ``policy_s`` replica-seconds, where the optimum takes ``optimum_s``.

    Raises :class:`policy.errors.TargetError` where no plan can serve enough.
    """
    at_once = replace(problem, lead_s=0.0)
    at_once_s = clairvoyant(at_once).replica_s
    return Regret(
        forecast_s=policy_s - optimum_s,
        lead_s=clairvoyant(problem).replica_s - at_once_s,
        integrality_s=at_once_s - lower_bound(at_once).replica_s,
    )


OURS = "predictive"


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one start-up time, over all seeds.

    ``gpu_hours`` are those at the SLO's attainment, interpolated between settings; ``None`` where no setting
    attains it. ``oracle_ratio`` is that over the offline optimum, ``least_ratio`` and ``most_ratio`` the
    minimum and maximum over the seeds, each alone at the SLO. Seeds in which the policy misses it are left
    out, and a mean may attain it where a seed does not, so the overall ratio may lie outside. ``lower_ratio``
    is over the lower bound. ``dominated`` says that predictive takes less. ``front`` is the Pareto front. The
    rest is of the cheapest ``setting`` that attains the SLO, or of the one that attains most. Only ``--json``
    shows ``dominated``, ``setting`` and ``failed``.
    """

    lead_s: float
    policy: str
    gpu_hours: float | None
    oracle_ratio: float | None
    least_ratio: float | None
    most_ratio: float | None
    lower_ratio: float | None
    dominated: bool | None
    setting: str
    attainment: float
    setting_gpu_hours: float
    goodput_per_gpu_hour: float
    ttft_p99_s: float
    recovery_s: float
    failed: float
    regret: Regret | None
    front: tuple[AttainmentPoint, ...]


class OracleCosts(msgspec.Struct, frozen=True, kw_only=True):
    """At one start-up time, means over the seeds: the bound, the plans, and the offline optimum.

    ``target`` is the attainment at which policies are compared: the SLO's, or the best of all runs where none
    attains it, which has no bound. ``plan_gpu_hours`` are those of the cheapest mix of plans that attains it
    (``None`` where none does), and ``gpu_hours`` those of the cheapest mix of all runs: a plan that knows the
    trace can repeat any policy's counts. ``mu`` is the capacity per replica of each seed's cheapest fluid
    plan that attains it, or else of the one that attains most. ``replicas`` is the optimum's mean count.
    """

    lead_s: float
    target: float
    mu: float
    lower_gpu_hours: float | None
    plan_gpu_hours: float | None
    gpu_hours: float
    replicas: float


class RankingTable(NamedTuple):
    """The rankings at all start-up times."""

    oracles: tuple[OracleCosts, ...]
    standings: tuple[Ranking, ...]


def rank(results: Sequence[PolicyTrialResult]) -> RankingTable:
    """The table of all ``results``."""
    oracles, standings = [], []
    for lead_s in dict.fromkeys(result.trial.lead_s for result in results):
        by_name: dict[str, list[PolicyTrialResult]] = {}
        for result in results:
            if result.trial.lead_s == lead_s:
                by_name.setdefault(result.trial.name, []).append(result)
        plans = by_name.pop(PLAN)
        known = _points([*plans, *(result for mine in by_name.values() for result in mine)])
        oracle = _oracle(plans, known)
        oracles.append(oracle)
        ours = None
        if OURS in by_name:
            hours = hours_at(averaged(_points(by_name[OURS])), oracle.target)
            ours = math.inf if hours is None else hours
        standings += [_standing(mine, known, oracle, ours) for mine in by_name.values()]
    return RankingTable(tuple(oracles), tuple(standings))


def _oracle(
    plans: Sequence[PolicyTrialResult], known: Mapping[int, Sequence[AttainmentPoint]]
) -> OracleCosts:
    """The offline optimum of all ``known`` runs, by seed, the ``plans`` among them."""
    setup = plans[0].trial.setup
    most = fmean(max(points).attainment for points in known.values())
    target = min(setup.attainment, math.floor(most * 1e4) / 1e4)
    hours = mixed_hours(known.values(), target)
    assert hours is not None
    return OracleCosts(
        lead_s=plans[0].trial.lead_s,
        target=target,
        mu=_capacity(plans, target),
        # The bound is of runs that attain the SLO: others may undercut it.
        lower_gpu_hours=fmean({result.trial.seed: result.lower_hours for result in plans}.values())
        if target == setup.attainment
        else None,
        plan_gpu_hours=mixed_hours(_points(plans).values(), target),
        gpu_hours=hours,
        replicas=hours * HOUR_S / (setup.stretch.until - setup.stretch.since),
    )


def _capacity(plans: Sequence[PolicyTrialResult], target: float) -> float:
    by_seed: dict[int, list[tuple[Score, float]]] = {}
    for plan in plans:
        if plan.mu is not None:
            by_seed.setdefault(plan.trial.seed, []).append((plan.score, plan.mu))
    chosen = []
    for fluid in by_seed.values():
        enough = [each for each in fluid if each[0].attainment >= target]
        chosen.append(
            min(enough, key=lambda each: each[0].gpu_hours)
            if enough
            else max(fluid, key=lambda each: each[0].attainment)
        )
    return fmean(mu for _, mu in chosen)


def _standing(
    mine: Sequence[PolicyTrialResult],
    known: Mapping[int, Sequence[AttainmentPoint]],
    oracle: OracleCosts,
    ours: float | None,
) -> Ranking:
    name = mine[0].trial.name
    by_seed = _points(mine)
    points = averaged(by_seed)
    hours = hours_at(points, oracle.target)
    ratios = [
        seed_hours / optimum
        for seed, found in by_seed.items()
        if (seed_hours := hours_at(found, oracle.target))
        and (optimum := hours_at(known[seed], oracle.target))
    ]
    enough = [point for point in points if point.attainment >= oracle.target]
    shown = min(enough, key=lambda point: point.gpu_hours) if enough else max(points)
    scores = [result.score for result in mine if result.trial.setting == shown.setting]
    return Ranking(
        lead_s=oracle.lead_s,
        policy=name,
        gpu_hours=hours,
        oracle_ratio=None if hours is None else hours / oracle.gpu_hours,
        least_ratio=min(ratios, default=None),
        most_ratio=max(ratios, default=None),
        lower_ratio=None
        if hours is None or oracle.lower_gpu_hours is None
        else hours / oracle.lower_gpu_hours,
        dominated=None if ours is None or name == OURS else hours is None or ours < hours,
        setting=shown.setting,
        attainment=shown.attainment,
        setting_gpu_hours=shown.gpu_hours,
        goodput_per_gpu_hour=fmean(score.goodput_per_gpu_hour for score in scores),
        ttft_p99_s=fmean(score.ttft_p99_s for score in scores),
        recovery_s=fmean(score.recovery_s for score in scores),
        failed=fmean(score.failed for score in scores),
        regret=None if hours is None else _regret(mine, hours, oracle),
        front=front(points),
    )


def _regret(mine: Sequence[PolicyTrialResult], hours: float, oracle: OracleCosts) -> Regret:
    """The mean over the seeds."""
    parts = []
    for trial in {result.trial.seed: result.trial for result in mine}.values():
        setup = replace(trial.setup, attainment=oracle.target)
        arrivals = setup.arrivals(trial.factor, trial.seed)
        asked = setup.problem(arrivals, oracle.mu, trial.lead_s, since=setup.stretch.since)
        parts.append(split(hours * HOUR_S, oracle.gpu_hours * HOUR_S, asked))
    fields = Regret.__struct_fields__
    return Regret(**{field: fmean(getattr(part, field) for part in parts) for field in fields})


def _points(results: Sequence[PolicyTrialResult]) -> dict[int, list[AttainmentPoint]]:
    found: dict[int, list[AttainmentPoint]] = {}
    for result in results:
        point = AttainmentPoint(result.score.attainment, result.score.gpu_hours, result.trial.setting)
        found.setdefault(result.trial.seed, []).append(point)
    return found
