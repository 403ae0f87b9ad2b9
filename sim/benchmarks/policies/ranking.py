"""The ranking of policies: the GPU time of each at the SLO, beside the offline plan and the lower bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec

from sim.benchmarks.policies.run import PLAN, TrialResult, problem
from sim.results.pareto import Point, averaged, front, hours_at, ratios
from sim.results.regret import Regret, split
from sim.twin.record import HOUR_S

OURS = "predictive"


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one lead, over all seeds.

    ``gpu_hours`` are what it takes for the attainment that is promised, between its settings; ``None`` where
    none of them attains it. ``oracle_ratio`` is that over what the plan takes in the twin, with the least and
    the most of any seed, and ``lower_ratio`` over the bound. ``dominated`` says that predictive takes less.
    The rest is of the cheapest ``setting`` that attains, or of the one that attains most; ``regret`` in
    seconds of replicas. ``front`` are the settings that no other one of the policy beats.
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
    switches: float
    failed: float
    regret: Regret | None
    front: tuple[Point, ...]


class OracleCosts(msgspec.Struct, frozen=True, kw_only=True):
    """At one lead, on average over the seeds: the bound, the plan on paper, and what its run took.

    ``mu`` requests per second of a replica is what the plan was made with, ``replicas`` how many it has on
    average.
    """

    lead_s: float
    mu: float
    lower_gpu_hours: float
    plan_gpu_hours: float
    gpu_hours: float
    attainment: float
    replicas: float


class RankingTable(NamedTuple):
    """All leads of a contest."""

    oracles: tuple[OracleCosts, ...]
    standings: tuple[Ranking, ...]


def rank(laps: Sequence[TrialResult]) -> RankingTable:
    """The table of all ``laps``. Raises :class:`ValueError` where no plan met the SLO."""
    oracles, standings = [], []
    for lead_s in dict.fromkeys(lap.heat.lead_s for lap in laps):
        here = [lap for lap in laps if lap.heat.lead_s == lead_s]
        oracle = _oracle([lap for lap in here if lap.heat.name == PLAN])
        oracles.append(oracle)
        standings += _ranked(here, oracle)
    return RankingTable(tuple(oracles), tuple(standings))


def _oracle(laps: Sequence[TrialResult]) -> OracleCosts:
    """The cheapest plan that meets the SLO in the simulator, averaged over the seeds."""
    promised = laps[0].heat.ground.attainment
    found = []
    for setting in dict.fromkeys(lap.heat.setting for lap in laps):
        same = [lap for lap in laps if lap.heat.setting == setting]
        attained = fmean(lap.score.attainment for lap in same)
        if attained >= promised:
            found.append((fmean(lap.score.gpu_hours for lap in same), attained, same))
    if not found:
        most = max(lap.score.attainment for lap in laps)
        raise ValueError(f"no plan attains {promised:g}, the best one {most:.4g}: make starts shorter")
    hours, attained, same = min(found, key=lambda each: each[0])
    stretch = same[0].heat.ground.stretch
    return OracleCosts(
        lead_s=same[0].heat.lead_s,
        mu=same[0].heat.mu,
        lower_gpu_hours=fmean(lap.lower_hours for lap in same),
        plan_gpu_hours=fmean(lap.plan_hours for lap in same),
        gpu_hours=hours,
        attainment=attained,
        replicas=hours * HOUR_S / (stretch.until - stretch.since),
    )


def _ranked(laps: Sequence[TrialResult], oracle: OracleCosts) -> list[Ranking]:
    names = [name for name in dict.fromkeys(lap.heat.name for lap in laps) if name != PLAN]
    ours = [lap for lap in laps if lap.heat.name == OURS]
    least = _hours(ours) if ours else None
    return [_standing([lap for lap in laps if lap.heat.name == name], laps, oracle, least) for name in names]


def _standing(
    mine: Sequence[TrialResult], all_laps: Sequence[TrialResult], oracle: OracleCosts, ours: float | None
) -> Ranking:
    name, ground = mine[0].heat.name, mine[0].heat.ground
    points = averaged(_points(mine))
    hours = hours_at(points, ground.attainment)
    plan = {
        lap.heat.seed: (Point(1.0, lap.score.gpu_hours),)
        for lap in all_laps
        if lap.heat.name == PLAN and lap.heat.mu == oracle.mu
    }
    by_seed = [
        ratio for ratio in ratios(_points(mine), plan, ground.attainment).values() if ratio is not None
    ]
    enough = [point for point in points if point.attainment >= ground.attainment]
    shown = min(enough, key=lambda point: point.gpu_hours) if enough else max(points)
    scores = [lap.score for lap in mine if lap.heat.setting == shown.setting]
    return Ranking(
        lead_s=oracle.lead_s,
        policy=name,
        gpu_hours=hours,
        oracle_ratio=None if hours is None else hours / oracle.gpu_hours,
        least_ratio=min(by_seed, default=None),
        most_ratio=max(by_seed, default=None),
        lower_ratio=None if hours is None else hours / oracle.lower_gpu_hours,
        dominated=None if ours is None or name == OURS else hours is None or ours < hours,
        setting=shown.setting,
        attainment=shown.attainment,
        setting_gpu_hours=shown.gpu_hours,
        goodput_per_gpu_hour=fmean(score.goodput_per_gpu_hour for score in scores),
        ttft_p99_s=fmean(score.ttft_p99_s for score in scores),
        recovery_s=fmean(score.recovery_s for score in scores),
        switches=fmean(score.switches for score in scores),
        failed=fmean(score.failed for score in scores),
        regret=None if hours is None else _regret(mine, hours, oracle),
        front=front(points),
    )


def _regret(mine: Sequence[TrialResult], hours: float, oracle: OracleCosts) -> Regret:
    """On average over the seeds; what the plan's run takes above the plan on paper is in ``forecast``."""
    parts = []
    for heat in {lap.heat.seed: lap.heat for lap in mine}.values():
        ground = heat.ground
        arrivals = ground.arrivals(heat.factor, heat.seed)
        asked = problem(ground, arrivals, oracle.mu, heat.lead_s, since=ground.stretch.since)
        parts.append(split(hours * HOUR_S, asked))
    fields = Regret.__struct_fields__
    return Regret(**{field: fmean(getattr(part, field) for part in parts) for field in fields})


def _hours(laps: Sequence[TrialResult]) -> float:
    hours = hours_at(averaged(_points(laps)), laps[0].heat.ground.attainment)
    return math.inf if hours is None else hours


def _points(laps: Sequence[TrialResult]) -> dict[int, list[Point]]:
    found: dict[int, list[Point]] = {}
    for lap in laps:
        point = Point(lap.score.attainment, lap.score.gpu_hours, lap.heat.setting)
        found.setdefault(lap.heat.seed, []).append(point)
    return found
