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
from serve.autoscaler.journal import Policies
from serve.state.targets import wanted_models

# Leaves the count as it is.
STAY = "static"


class PolicySet:
    """Made anew only where the document says something else. What a user's policy does wrong is an event."""

    def __init__(self, event: Callable[[str], None]) -> None:
        self._event = event
        self._made: dict[str, tuple[Policies, ModelPolicies]] = {}
        self._prepared: dict[str, tuple[Policies, ModelPolicies]] = {}

    def prepare(self, deployment: Deployment) -> None:
        """Make those of ``deployment``; raises :class:`policy.errors.ConfigError`."""
        self._prepared = {spec.name: self._of(spec) for spec in wanted_models(deployment)}

    def ready(self, deployment: Deployment) -> None:
        """Make what is not known yet of ``deployment``; raises :class:`policy.errors.ConfigError`."""
        self._prepared = {
            spec.name: self._known(spec) or self._of(spec) for spec in wanted_models(deployment)
        }

    def adopt(self) -> None:
        """Take those that are ready for those that decide."""
        self._made, self._prepared = self._prepared, {}

    def take_up(self, deployment: Deployment) -> None:
        """Make those of a document that was applied once; for one that is no longer to be had counts stay.

        Safety and whoever waits for a model at zero are heard all the same.
        """
        for spec in wanted_models(deployment):
            try:
                self._made[spec.name] = self._of(spec)
            except ConfigError as error:
                self._event(f"{spec.name}: {STAY} decides instead: {error}")
                stays = msgspec.structs.replace(spec.control, policy=STAY, shadow=None)
                self._made[spec.name] = self._of(msgspec.structs.replace(spec, control=stays))

    def _known(self, spec: ModelSpec) -> tuple[Policies, ModelPolicies] | None:
        known = (self._prepared.get(spec.name), self._made.get(spec.name))
        chosen = policies_of(spec)
        return next((each for each in known if each is not None and each[0] == chosen), None)

    def _of(self, spec: ModelSpec) -> tuple[Policies, ModelPolicies]:
        chosen = policies_of(spec)
        return chosen, policies_for(spec.name, chosen, self._event)

    def __contains__(self, model: str) -> bool:
        return model in self._made

    def mind(self, model: str) -> ModelPolicies:
        """Who decides for ``model``."""
        return self._made[model][1]

    def policies(self, model: str) -> Policies:
        """What the document says of them."""
        return self._made[model][0]

    def name(self, model: str) -> str:
        """The live policy's name, and of a user's own its class."""
        if model not in self._made:
            return "nobody"
        label = choose(_path(model, "policy"), self._made[model][0].live).label
        return label.rpartition("/")[2]


def policies_of(spec: ModelSpec) -> Policies:
    """The policies that the document names, and the built-in ones beside them."""
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
        # One that is only asked for comparison must not keep the live one from deciding.
        others={name: GuardedPolicy(make(choose("", name)), event) for name in chosen.others},
    )


def _made(path: str, choice: Choice, event: Callable[[str], None]) -> Policy:
    chosen = choose(path, choice)
    if chosen.name == CUSTOM:
        return GuardedPolicy(load(chosen, path), event, alone=True)
    return GuardedPolicy(make(chosen), event)


def _path(model: str, key: str) -> str:
    return f"models[{model}].control.{key}"
