"""From a wish to a target: what a new mode or configuration may do to the replicas that run."""

from __future__ import annotations

import msgspec

from policy.config.deployment import Deployment, ModelSpec
from policy.errors import SwitchRefused
from policy.scaling.rollout import Goal, needs_gap
from serve.state.observed import ObservedState
from serve.state.targets import DesiredMode, Target


def goal_of(target: Target, more: int = 0) -> Goal:
    """What the planner steers for, with so many ``more`` while one is replaced."""
    healthy = min(target.spec.control.scale.min_healthy, target.aim.count)
    return Goal(key=target.key(), count=target.aim.count + more, min_healthy=healthy, gap=target.gap)


def starves(proposed: Target, observation: ObservedState, deployment: Deployment) -> bool:
    """Whether the switch leaves a moment without replicas, which the queue is able to hold.

    Raises :class:`policy.errors.SwitchRefused` when the queue is not.
    """
    name, goal = proposed.spec.name, goal_of(proposed)
    layers, footprints = observation.layers(name), observation.footprints(proposed)
    if not needs_gap(goal, layers, footprints, *observation.room(proposed, deployment.budget)):
        return False
    start_s = observation.start_s(goal.key, proposed.spec.control.assumed_start_s)
    limit_s = deployment.gateway.queue_timeout_s
    if start_s > limit_s:
        raise SwitchRefused(
            f"{name}: {describe(proposed.aim)} needs resources that the running replicas hold, and its start"
            f" takes about {start_s:.0f} s: gateway.queue_timeout_s = {limit_s:g} s cannot hold the"
            " requests that arrive meanwhile"
        )
    return True


def adopted(
    target: Target, spec: ModelSpec, observation: ObservedState, deployment: Deployment, now: float
) -> Target:
    """``target`` with ``spec`` as its configuration: live where it can, a new generation where not.

    Raises :class:`policy.errors.SwitchRefused` like :func:`starves`.
    """
    taken = target.adopting(spec, now)
    if taken.key() == target.key():
        return msgspec.structs.replace(taken, gap=target.gap)
    return msgspec.structs.replace(taken, gap=starves(taken, observation, deployment))


def describe(aim: DesiredMode) -> str:
    """An aim in words."""
    return f"{aim.mode} x {aim.count}, generation {aim.generation}"
