"""The policies of each model: the one that decides, its shadow, and all the others for comparison."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from policy.config.control import Choice
from policy.config.deployment import Deployment, ModelSpec
from policy.errors import ConfigError
from policy.scaling.decide import ModelPolicies
from policy.scaling.policies.registry import CUSTOM, NAMES, choose, make
from policy.scaling.view import Policy
from serve.autoscaler.custom_policy import GuardedPolicy, load
from serve.autoscaler.decision_journal import Policies
from serve.state.desired_state import wanted_models

# Keeps the replica count.
STAY = "static"


class PolicySet:
    """Policies are made again only where the configuration changed. Errors of a user's policy are events."""

    def __init__(self, event: Callable[[str], None]) -> None:
        self._event = event
        self._made: dict[str, tuple[Policies, ModelPolicies]] = {}
        self._prepared: dict[str, tuple[Policies, ModelPolicies]] = {}

    def prepare(self, deployment: Deployment) -> None:
        """Make the policies of ``deployment``; raises :class:`policy.errors.ConfigError`."""
        self._prepared = {spec.name: self._make(spec) for spec in wanted_models(deployment)}

    def ready(self, deployment: Deployment) -> None:
        """Make the missing policies of ``deployment``; raises :class:`policy.errors.ConfigError`."""
        self._prepared = {
            spec.name: self._known(spec) or self._make(spec) for spec in wanted_models(deployment)
        }

    def adopt(self) -> None:
        """Let the policies that are ready decide from now on."""
        self._made, self._prepared = self._prepared, {}

    def restore(self, deployment: Deployment) -> None:
        """Make the policies of a deployment that was applied before; a missing one keeps replica counts.

        Guardrails, and waking a model at zero, work all the same.
        """
        for spec in wanted_models(deployment):
            try:
                self._made[spec.name] = self._make(spec)
            except ConfigError as error:
                self._event(f"{spec.name}: {STAY} decides instead: {error}")
                stays = msgspec.structs.replace(spec.control, policy=STAY, shadow=None)
                self._made[spec.name] = self._make(msgspec.structs.replace(spec, control=stays))

    def _known(self, spec: ModelSpec) -> tuple[Policies, ModelPolicies] | None:
        known = (self._prepared.get(spec.name), self._made.get(spec.name))
        chosen = policies_of(spec)
        return next((each for each in known if each is not None and each[0] == chosen), None)

    def _make(self, spec: ModelSpec) -> tuple[Policies, ModelPolicies]:
        chosen = policies_of(spec)
        return chosen, policies_for(spec.name, chosen, self._event)

    def __contains__(self, model: str) -> bool:
        return model in self._made

    def of(self, model: str) -> ModelPolicies:
        """The policies of ``model``."""
        return self._made[model][1]

    def chosen(self, model: str) -> Policies:
        """Which policies the deployment configures for ``model``."""
        return self._made[model][0]

    def name(self, model: str) -> str:
        """The name of the live policy; of a user's policy that of its class."""
        if model not in self._made:
            return "nobody"
        label = choose(_path(model, "policy"), self._made[model][0].live).label
        return label.rpartition("/")[2]


def policies_of(spec: ModelSpec) -> Policies:
    """The configured policies, and the built-in ones for comparison."""
    control = spec.control
    live = choose(_path(spec.name, "policy"), control.policy).name
    return Policies(
        live=control.policy, shadow=control.shadow, others=tuple(name for name in NAMES if name != live)
    )


def policies_for(model: str, chosen: Policies, event: Callable[[str], None]) -> ModelPolicies:
    """Make them; raises :class:`policy.errors.ConfigError`. Imports what users wrote."""
    return ModelPolicies(
        live=_made(_path(model, "policy"), chosen.live, event),
        shadow=None if chosen.shadow is None else _made(_path(model, "shadow"), chosen.shadow, event),
        # A policy for comparison must not keep the live one from deciding.
        others={name: GuardedPolicy(make(choose("", name)), event) for name in chosen.others},
    )


def _made(path: str, choice: Choice, event: Callable[[str], None]) -> Policy:
    chosen = choose(path, choice)
    if chosen.name == CUSTOM:
        return GuardedPolicy(load(chosen, path), event, alone=True)
    return GuardedPolicy(make(chosen), event)


def _path(model: str, key: str) -> str:
    return f"models[{model}].control.{key}"
