"""Divides the shared budget (GPUs, cores, watts, money) among models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from policy.config.deployment import ResourceBudget
from policy.scaling.budget_resources import ROUNDING, Resources, total
from policy.scaling.decision_types import Situation
from policy.scaling.reconcile_steps import CPU_OVERCOMMIT


class BudgetClaim(NamedTuple):
    """The claim of one model: ``asked`` replicas that take ``each``, the first ``floor`` of them guaranteed.

    ``now`` is its current count, ``held`` all that its replicas take, draining ones and other shapes
    included; with ``replaces`` (a switch) that is released. A ``starved`` model may take from lower
    priorities. ``reserve`` is what a waiting switch needs in all.
    """

    model: str
    priority: int
    each: Resources
    asked: int
    floor: int
    now: int
    held: Resources
    replaces: bool = False
    starved: bool = False
    reserve: Resources = Resources()


def held(situation: Situation) -> Resources:
    """What the model's replicas take, or will at once: of its layer what is aimed for, or runs, if more."""
    supply = situation.supply
    running = supply.serving + len(supply.starting_s) + supply.draining
    counts = dict(situation.leaving)
    counts[situation.mode] = counts.get(situation.mode, 0) + max(supply.wanted, running)
    actual = aimed = Resources()
    for option in situation.mode_options:
        actual = actual.plus(option.resources, counts.get(option.mode, 0))
        aimed = aimed.plus(option.resources, situation.count if option.mode == situation.mode else 0)
    return actual.most(aimed)


def spare(claims: Iterable[BudgetClaim], budget: ResourceBudget) -> Resources:
    """What is free, with cores as often as a switch may overcommit them."""
    bounds = total(budget)
    return _less_held(bounds._replace(cpus=bounds.cpus * CPU_OVERCOMMIT), claims)


def alone(model: str, claims: Mapping[str, BudgetClaim], budget: ResourceBudget) -> Resources:
    """What ``model`` could hold while no other model is scaled down for it."""
    return _less_held(total(budget), (claim for claim in claims.values() if claim.model != model))


def _less_held(left: Resources, claims: Iterable[BudgetClaim]) -> Resources:
    return reduce(lambda rest, claim: rest.plus(claim.held, -1), claims, left)


def attainable(model: str, claims: Mapping[str, BudgetClaim], budget: ResourceBudget) -> Resources:
    """What ``model`` could hold if models of lower priority were scaled down to their floors."""
    left = total(budget)
    for claim in claims.values():
        if claim.model != model:
            yields = claim.priority < claims[model].priority
            keeps = Resources().plus(claim.each, min(claim.floor, claim.now)) if yields else claim.held
            left = left.plus(keeps, -1)
    return left


def allocate(claims: Sequence[BudgetClaim], budget: ResourceBudget) -> dict[str, int]:
    """The count that each model gets, never more than it asks for.

    First every floor, the highest priority first; then what each asks for, by priority. Models of one
    priority take nothing in use from each other; the one that lacks the most is served next. A model that is
    not starved takes nothing in use above its floor from lower priorities either. The claim of a switch is
    kept from lower priorities, down to their floors, if it can be met whole. A model only grows into free
    resources: others have to release them first. Watts and money, if exceeded, take no running model below
    its floor.
    """
    left = total(budget)
    ranked = sorted(claims, key=lambda claim: (-claim.priority, claim.model))
    levels = [
        [claim for claim in ranked if claim.priority == priority]
        for priority in sorted({claim.priority for claim in claims}, reverse=True)
    ]
    shares = dict.fromkeys((claim.model for claim in ranked), 0)
    for level in levels:
        left = _filled(level, lambda claim: min(claim.floor, claim.asked), shares, left)
    for level in levels:
        there = left._replace(watts=math.inf, cost_per_h=math.inf)
        _filled(level, lambda claim: min(claim.floor, claim.asked, claim.now), shares, there)
        left = total(budget)
        for claim in ranked:
            left = left.plus(claim.each, -shares[claim.model])
    reserved = []
    for level in levels:
        left = _filled(level, _kept, shares, left)
        left = _filled([claim for claim in level if claim.starved], lambda claim: claim.asked, shares, left)
        reserved.append(_claimed(level, shares, left))
        left = left.plus(reserved[-1], -1)
    for index, level in enumerate(levels):
        # Claims bind lower priorities alone.
        kept = reduce(Resources.plus, reserved[index:])
        left = _filled(level, lambda claim: claim.asked, shares, left.plus(kept)).plus(kept, -1)

    free = _less_held(total(budget), ranked)
    grants = {}
    for claim in ranked:
        grants[claim.model], free = _granted(claim, shares[claim.model], free)
    return grants


def _kept(claim: BudgetClaim) -> int:
    """How many of the requested replicas exist already."""
    return min(claim.asked, claim.held.holds(claim.each) if claim.replaces else claim.now)


def _filled(
    level: Sequence[BudgetClaim], goal: Callable[[BudgetClaim], int], shares: dict[str, int], left: Resources
) -> Resources:
    """Raise shares of one priority towards the goal, one replica at a time; returns what is left."""
    short = [claim for claim in level if shares[claim.model] < goal(claim)]
    while short:
        claim = max(short, key=lambda claim: 1 - shares[claim.model] / goal(claim))
        if left.holds(claim.each):
            left = left.plus(claim.each, -1)
            shares[claim.model] += 1
        if shares[claim.model] >= goal(claim) or not left.holds(claim.each):
            short.remove(claim)
    return left


def _claimed(level: Sequence[BudgetClaim], shares: Mapping[str, int], left: Resources) -> Resources:
    """What those of one priority claim beyond their shares, of what is ``left``.

    A claim that can only be had in part is not kept: a part of it is of no use.
    """
    claimed = Resources()
    for claim in level:
        beyond = claim.reserve.plus(claim.each, -shares[claim.model]).most(Resources())
        room = left.plus(claimed, -1)
        if all(mine <= there + ROUNDING for mine, there in zip(beyond, room, strict=True) if mine > 0):
            claimed = claimed.plus(beyond)
    return claimed


def _granted(claim: BudgetClaim, share: int, free: Resources) -> tuple[int, Resources]:
    """How many replicas of its share a model gets now, and what is free then."""
    if claim.replaces:
        grant = min(share, free.plus(claim.held).holds(claim.each))
        return grant, free.plus(claim.held).plus(claim.held.most(Resources().plus(claim.each, grant)), -1)
    more = max(0, min(share - claim.now, free.holds(claim.each)))
    return min(share, claim.now) + more, free.plus(claim.each, -more)
