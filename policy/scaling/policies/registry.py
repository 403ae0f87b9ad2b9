"""The scaling policies, and how a config chooses one: by name, or by name with parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from policy.config.convert import convert, did_you_mean, prepare_decoders, require
from policy.errors import ConfigError
from policy.scaling.policies.panic_window import PanicWindow
from policy.scaling.policies.predictive import Predictive
from policy.scaling.policies.static import Static
from policy.scaling.policies.target_tracking import TargetTracking
from policy.scaling.policies.token_saturation import TokenSaturation
from policy.scaling.view import Policy

CUSTOM = "custom"
# A module, or the file that the command line has found beside the deployment file.
_CLASS = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|/[^:]+\.py):[A-Za-z_]\w*")


# The fields of each class are its parameters in a config.
BUILTIN: dict[str, type[Policy]] = {
    "static": Static,
    "target_tracking": TargetTracking,
    "panic_window": PanicWindow,
    "token_saturation": TokenSaturation,
    "predictive": Predictive,
}
NAMES = tuple(BUILTIN)
prepare_decoders(*BUILTIN.values())


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The ``name`` of a policy, and the built-in ``policy``, or the class and arguments of a custom one."""

    name: str
    policy: Policy | None = None
    class_path: str = ""
    arguments: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """Its name in decisions and their journal."""
        return self.class_path or self.name


def choose(path: str, raw: object) -> PolicyChoice:
    """The choice at ``path`` of the config; raises :class:`policy.errors.ConfigError`."""
    inner, name, parameters = path, raw, None
    if not isinstance(raw, str):
        if not isinstance(raw, Mapping) or len(raw) != 1:
            expected = "the name of a policy, or a mapping of that one name to its parameters"
            raise ConfigError(path, raw, expected)
        ((name, parameters),) = raw.items()
        inner = f"{path}.{name}"
    if name == CUSTOM:
        return _custom(inner, parameters)
    if not isinstance(name, str) or name not in BUILTIN:
        known = did_you_mean(str(name), [*NAMES, CUSTOM])
        raise ConfigError(path, name, f"one of the policies: {known}")
    # A name with nothing after its colon has default parameters.
    given = {} if parameters is None else parameters
    return PolicyChoice(name=name, policy=convert(given, BUILTIN[name], inner))


def make(chosen: PolicyChoice) -> Policy:
    """The built-in policy that was chosen; :mod:`serve.autoscaler.custom_policy` loads custom ones."""
    assert chosen.policy is not None
    return chosen.policy


def _custom(path: str, parameters: object) -> PolicyChoice:
    if not isinstance(parameters, Mapping):
        return PolicyChoice(name=CUSTOM, class_path=_class_path(path, parameters))
    class_path = _class_path(f"{path}.class", parameters.get("class"))
    arguments = {key: value for key, value in parameters.items() if key != "class"}
    for key, value in arguments.items():
        named = isinstance(key, str) and key.isidentifier()
        require(named, f"{path}.{key}", value, "a name of an argument of the class as the key")
    return PolicyChoice(name=CUSTOM, class_path=class_path, arguments=arguments)


def _class_path(path: str, value: object) -> str:
    if not isinstance(value, str) or not _CLASS.fullmatch(value):
        raise ConfigError(path, value, "module:Class, as in my_policies:Steps")
    return value
