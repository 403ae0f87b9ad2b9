"""The policies that a simulation compares: those of the document, or others in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import yaml

from policy.config.control import Choice
from policy.config.deployment import Deployment, ModelSpec
from policy.errors import ConfigError
from policy.scaling.policies.registry import CUSTOM, PolicyChoice, choose, make
from policy.scaling.view import Policy
from policy.types import EngineKind
from serve.autoscaler.custom_policy import GuardedPolicy, beside, load
from sim.results.comparison import PolicyEntry


def simulated_policy(deployment: Deployment) -> Deployment:
    """The deployment without models that Tidegate does not deploy; raises :class:`ConfigError` if all are."""
    models = tuple(spec for spec in deployment.models if spec.engine is not EngineKind.EXTERNAL)
    if not models:
        found = deployment.models[0]
        raise ConfigError(
            f"models[{found.name}].engine",
            found.engine.value,
            "vllm or sim: of other servers nothing is known",
        )
    return msgspec.structs.replace(deployment, models=models)


def choices(option: str, text: str) -> list[Choice]:
    """The policies in ``text``, divided by commas: names, or names with parameters in braces.

    Raises :class:`policy.errors.ConfigError`.
    """
    expected = "policies as in the document, such as predictive, or 'predictive: {quantile: 0.95}'"
    try:
        found = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        raise ConfigError(option, text, expected) from None
    if not isinstance(found, list) or not found:
        raise ConfigError(option, text, expected)
    return [_checked(option, each) for each in found]


def _checked(option: str, raw: object) -> Choice:
    choice = beside(raw, Path.cwd()) if isinstance(raw, dict) else raw
    if not isinstance(choice, str | dict):
        raise ConfigError(option, raw, "the name of a policy")
    if choice != CUSTOM:  # without a class it is the one of the document
        choose(option, choice)
    return choice


def policy_entries(
    deployment: Deployment, given: Sequence[Choice], event: Callable[[str], None]
) -> list[PolicyEntry]:
    """One for each of the choices ``given``, or the document as it is.

    A bare name that a model's document has parameters for keeps them. ``event`` is told what a user's policy
    does wrong. Raises :class:`policy.errors.ConfigError`.
    """
    if not given:
        labels = dict.fromkeys(_chosen(spec).label for spec in deployment.models)
        return [_contender("+".join(_short(label) for label in labels), deployment, event)]
    found: list[PolicyEntry] = []
    for choice in given:
        models = tuple(_with(spec, choice) for spec in deployment.models)
        name = _short(choose("--policy", models[0].control.policy).label)
        if any(name == each.name for each in found) and isinstance(choice, dict):
            name += " " + msgspec.json.encode(next(iter(choice.values()))).decode()
        if any(name == each.name for each in found):
            raise ConfigError("--compare", name, "each policy once")
        found.append(_contender(name, msgspec.structs.replace(deployment, models=models), event))
    return found


def _with(spec: ModelSpec, choice: Choice) -> ModelSpec:
    written = spec.control.policy
    if isinstance(choice, str) and isinstance(written, dict) and choice in written:
        return spec
    control = msgspec.structs.replace(spec.control, policy=choice)
    return msgspec.structs.replace(spec, control=control)


def _contender(name: str, deployment: Deployment, event: Callable[[str], None]) -> PolicyEntry:
    return PolicyEntry(name, deployment, {spec.name: _made(spec, event) for spec in deployment.models})


def _made(spec: ModelSpec, event: Callable[[str], None]) -> Policy:
    chosen = _chosen(spec)
    if chosen.name == CUSTOM:
        return GuardedPolicy(load(chosen, _path(spec)), event)
    return make(chosen)


def _chosen(spec: ModelSpec) -> PolicyChoice:
    return choose(_path(spec), spec.control.policy)


def _path(spec: ModelSpec) -> str:
    return f"models[{spec.name}].control.policy"


def _short(label: str) -> str:
    return label.rpartition("/")[2]
