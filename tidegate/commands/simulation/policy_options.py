"""The policies that a simulation compares: those of the deployment file, or others instead."""

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
from sim.results.run_summary import PolicyEntry


def simulated_policy(deployment: Deployment) -> Deployment:
    """The deployment without external models; raises :class:`ConfigError` if there is no other."""
    models = tuple(spec for spec in deployment.models if spec.engine is not EngineKind.EXTERNAL)
    if not models:
        first = deployment.models[0]
        raise ConfigError(
            f"models[{first.name}].engine", first.engine.value, "vllm or sim: external servers have no model"
        )
    return msgspec.structs.replace(deployment, models=models)


def choices(option: str, text: str) -> list[Choice]:
    """The policies in ``text``, separated by commas: names, or names with parameters in braces."""
    expected = "policies as in the deployment file, such as predictive, or 'predictive: {quantile: 0.95}'"
    try:
        values = yaml.safe_load(f"[{text}]")
    except yaml.YAMLError:
        raise ConfigError(option, text, expected) from None
    if not isinstance(values, list) or not values:
        raise ConfigError(option, text, expected)
    return [_checked(option, each) for each in values]


def _checked(option: str, raw: object) -> Choice:
    choice = beside(raw, Path.cwd()) if isinstance(raw, dict) else raw
    if not isinstance(choice, str | dict):
        raise ConfigError(option, raw, "the name of a policy")
    if choice != CUSTOM:  # without a class: the one of the deployment file
        choose(option, choice)
    return choice


def policy_entries(
    deployment: Deployment, given: Sequence[Choice], event: Callable[[str], None]
) -> list[PolicyEntry]:
    """One entry for each of the choices ``given``, or for the deployment file as it is.

    A name without parameters keeps those that a model's spec has for it. ``event`` receives messages about
    failures of a custom policy.
    """
    if not given:
        labels = dict.fromkeys(_chosen(spec).label for spec in deployment.models)
        return [_entry("+".join(_short(label) for label in labels), deployment, event)]
    rows = []
    for choice in given:
        models = tuple(_with(spec, choice) for spec in deployment.models)
        rows.append((_short(choose("--policy", models[0].control.policy).label), choice, models))
    policies = [policy for policy, _, _ in rows]
    entries: list[PolicyEntry] = []
    for name, choice, models in rows:
        if isinstance(choice, dict) and policies.count(name) > 1:
            label = f"{name} {msgspec.json.encode(next(iter(choice.values()))).decode()}"
        else:
            label = name
        if any(label == entry.name for entry in entries):
            raise ConfigError("--compare", label, "each policy once")
        entries.append(_entry(label, msgspec.structs.replace(deployment, models=models), event))
    return entries


def _with(spec: ModelSpec, choice: Choice) -> ModelSpec:
    configured = spec.control.policy
    if isinstance(choice, str) and isinstance(configured, dict) and choice in configured:
        return spec
    control = msgspec.structs.replace(spec.control, policy=choice)
    return msgspec.structs.replace(spec, control=control)


def _entry(name: str, deployment: Deployment, event: Callable[[str], None]) -> PolicyEntry:
    policies: dict[str, Policy] = {}
    for spec in deployment.models:
        chosen = _chosen(spec)
        custom = chosen.name == CUSTOM
        policies[spec.name] = GuardedPolicy(load(chosen, _path(spec)), event) if custom else make(chosen)
    return PolicyEntry(name, deployment, policies)


def _chosen(spec: ModelSpec) -> PolicyChoice:
    return choose(_path(spec), spec.control.policy)


def _path(spec: ModelSpec) -> str:
    return f"models[{spec.name}].control.policy"


def _short(label: str) -> str:
    return label.rpartition("/")[2]
