"""The policies of each model: the one that decides, its shadow, and all the others for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from policy.config.control import Choice
from policy.config.deployment import Deployment, ModelSpec
from policy.errors import ConfigError
from policy.scaling.decide import ModelPolicies
from policy.scaling.policies.registry import CUSTOM, NAMES, choose, make
from policy.scaling.view import Policy
from serve.autoscaler.custom_policy import GuardedPolicy, load_within
from serve.autoscaler.decision_journal import JournaledPolicies
from serve.state.desired_state import wanted_models

# Keeps the replica count.
STAY = "static"
# Maximum duration of the import and making of a user's policy: a controller that starts waits for it. Twice
# that of the check before an apply, as all of a host may start at once.
LOAD_S = 10.0

Event = Callable[[str], None]


class PolicyInstances(NamedTuple):
    """The configured policies of a model, and the instances that were made of them."""

    chosen: JournaledPolicies
    instances: ModelPolicies

    def live_name(self, model: str) -> str:
        """The name of the live policy; of a user's policy that of its class."""
        return choose(_path(model, "policy"), self.chosen.live).label.rpartition("/")[2]


def make_policies(deployment: Deployment, event: Event) -> dict[str, PolicyInstances]:
    """The policies of each model; raises :class:`policy.errors.ConfigError`. Not for an event loop."""
    return {spec.name: _made_policies(spec, event) for spec in wanted_models(deployment)}


def restore_policies(deployment: Deployment, event: Event) -> dict[str, PolicyInstances]:
    """The policies of a deployment that was applied before; a missing one keeps replica counts.

    Guardrails, and waking a model at zero, work all the same.
    """
    restored = {}
    for spec in wanted_models(deployment):
        try:
            restored[spec.name] = _made_policies(spec, event)
        except ConfigError as error:
            event(f"{spec.name}: {STAY} decides instead: {error}")
            control = replace(spec.control, policy=STAY, shadow=None)
            restored[spec.name] = _made_policies(replace(spec, control=control), event)
    return restored


def _made_policies(spec: ModelSpec, event: Event) -> PolicyInstances:
    chosen = policies_of(spec)
    return PolicyInstances(chosen, policies_for(spec.name, chosen, event))


def policies_of(spec: ModelSpec) -> JournaledPolicies:
    """The configured policies, and the built-in ones for comparison."""
    control = spec.control
    live = choose(_path(spec.name, "policy"), control.policy).name
    return JournaledPolicies(
        live=control.policy, shadow=control.shadow, others=tuple(name for name in NAMES if name != live)
    )


def policies_for(model: str, chosen: JournaledPolicies, event: Event) -> ModelPolicies:
    """Make the policies; errors of a user's policy are events. Raises :class:`policy.errors.ConfigError`."""
    return ModelPolicies(
        live=_made(_path(model, "policy"), chosen.live, event),
        shadow=None if chosen.shadow is None else _made(_path(model, "shadow"), chosen.shadow, event),
        # A policy for comparison must not keep the live one from deciding.
        others={name: GuardedPolicy(make(choose("", name)), event) for name in chosen.others},
    )


def _made(path: str, choice: Choice, event: Event) -> Policy:
    chosen = choose(path, choice)
    if chosen.name == CUSTOM:
        return GuardedPolicy(load_within(LOAD_S, chosen, path), event, alone=True)
    return GuardedPolicy(make(chosen), event)


def _path(model: str, key: str) -> str:
    return f"models[{model}].control.{key}"
