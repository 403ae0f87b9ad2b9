"""Divides the shared budget (GPUs, cores, watts, money) among models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from policy.config.deployment import Budget
from policy.scaling.decision_types import Situation
from policy.scaling.resources import ROUNDING, Resources, total
from policy.scaling.rollout import CPU_OVERCOMMIT


class Claim(NamedTuple):
    """The claim of one model: ``asked`` replicas that take ``each``, the first ``floor`` of them guaranteed.

    ``now`` is its current count, ``held`` all that its replicas take, draining ones and other shapes
    included; with ``replaces`` (a switch) that is released. A ``starved`` model may take from lower
    priorities. ``claim`` is what a waiting switch needs in all.
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
    claim: Resources = Resources()


def held(situation: Situation) -> Resources:
    """What the model's replicas take, or will at once: of its layer what is aimed for, or runs, if more."""
    supply = situation.supply
    running = supply.serving + len(supply.starting_s) + supply.draining
    counts = dict(situation.leaving)
    counts[situation.mode] = counts.get(situation.mode, 0) + max(supply.wanted, running)
    actual = aimed = Resources()
    for rung in situation.rungs:
        actual = actual.plus(rung.resources, counts.get(rung.mode, 0))
        aimed = aimed.plus(rung.resources, situation.count if rung.mode == situation.mode else 0)
    return actual.most(aimed)


def spare(wants: Iterable[Claim], budget: Budget) -> Resources:
    """What is free, with cores as often as a switch may overcommit them."""
    bounds = total(budget)
    return _less_held(bounds._replace(cpus=bounds.cpus * CPU_OVERCOMMIT), wants)


def alone(model: str, wants: Mapping[str, Claim], budget: Budget) -> Resources:
    """What ``model`` could hold while no other model is scaled down for it."""
    return _less_held(total(budget), (want for want in wants.values() if want.model != model))


def _less_held(left: Resources, wants: Iterable[Claim]) -> Resources:
    return reduce(lambda rest, want: rest.plus(want.held, -1), wants, left)


def attainable(model: str, wants: Mapping[str, Claim], budget: Budget) -> Resources:
    """What ``model`` could hold if models of lower priority were scaled down to their floors."""
    left = total(budget)
    for want in wants.values():
        if want.model != model:
            yields = want.priority < wants[model].priority
            keeps = Resources().plus(want.each, min(want.floor, want.now)) if yields else want.held
            left = left.plus(keeps, -1)
    return left


def allocate(wants: Sequence[Claim], budget: Budget) -> dict[str, int]:
    """The count that each model gets, never more than it asks for.

    First every floor, the highest priority first; then what each asks for, by priority. Models of one
    priority take nothing in use from each other; the one that lacks the most is served next. A model that is
    not starved takes nothing in use above its floor from lower priorities either. The claim of a switch is
    kept from lower priorities, down to their floors, if it can be met whole. A model only grows into free
    resources: others have to release them first. Watts and money, if exceeded, take no running model below
    its floor.
    """
    left = total(budget)
    ranked = sorted(wants, key=lambda want: (-want.priority, want.model))
    levels = [
        [w for w in ranked if w.priority == p] for p in sorted({w.priority for w in wants}, reverse=True)
    ]
    shares = dict.fromkeys((want.model for want in ranked), 0)
    for level in levels:
        left = _filled(level, lambda want: min(want.floor, want.asked), shares, left)
    for level in levels:
        there = left._replace(watts=math.inf, cost_per_h=math.inf)
        _filled(level, lambda want: min(want.floor, want.asked, want.now), shares, there)
        left = total(budget)
        for want in ranked:
            left = left.plus(want.each, -shares[want.model])
    claims = []
    for level in levels:
        left = _filled(level, _kept, shares, left)
        left = _filled([want for want in level if want.starved], lambda want: want.asked, shares, left)
        claims.append(_claimed(level, shares, left))
        left = left.plus(claims[-1], -1)
    for index, level in enumerate(levels):
        # Claims bind lower priorities alone.
        kept = reduce(Resources.plus, claims[index:])
        left = _filled(level, lambda want: want.asked, shares, left.plus(kept)).plus(kept, -1)

    free = _less_held(total(budget), ranked)
    grants = {}
    for want in ranked:
        grants[want.model], free = _granted(want, shares[want.model], free)
    return grants


def _kept(want: Claim) -> int:
    """How many of the requested replicas exist already."""
    return min(want.asked, want.held.holds(want.each) if want.replaces else want.now)


def _filled(
    level: Sequence[Claim], goal: Callable[[Claim], int], shares: dict[str, int], left: Resources
) -> Resources:
    """Raise shares of one priority towards the goal, one replica at a time; returns what is left."""
    short = [want for want in level if shares[want.model] < goal(want)]
    while short:
        want = max(short, key=lambda want: 1 - shares[want.model] / goal(want))
        if left.holds(want.each):
            left = left.plus(want.each, -1)
            shares[want.model] += 1
        if shares[want.model] >= goal(want) or not left.holds(want.each):
            short.remove(want)
    return left


def _claimed(level: Sequence[Claim], shares: Mapping[str, int], left: Resources) -> Resources:
    """What those of one priority claim beyond their shares, of what is ``left``.

    A claim that can only be had in part is not kept: nobody would have any use of it.
    """
    claimed = Resources()
    for want in level:
        beyond = want.claim.plus(want.each, -shares[want.model]).most(Resources())
        room = left.plus(claimed, -1)
        if all(mine <= there + ROUNDING for mine, there in zip(beyond, room, strict=True) if mine > 0):
            claimed = claimed.plus(beyond)
    return claimed


def _granted(want: Claim, share: int, free: Resources) -> tuple[int, Resources]:
    """How many replicas of its share a model gets now, and what is free then."""
    if want.replaces:
        grant = min(share, free.plus(want.held).holds(want.each))
        return grant, free.plus(want.held).plus(want.held.most(Resources().plus(want.each, grant)), -1)
    more = max(0, min(share - want.now, free.holds(want.each)))
    return min(share, want.now) + more, free.plus(want.each, -more)
