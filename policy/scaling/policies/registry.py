"""The scaling policies, and how a config chooses one: by name, or by name with parameters."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from policy.config.control import Section
from policy.config.convert import convert
from policy.errors import ConfigError
from policy.scaling.policies.panic_window import PanicWindow, PanicWindowParameters
from policy.scaling.policies.predictive import Predictive, PredictiveParameters
from policy.scaling.policies.static import Static, StaticParameters
from policy.scaling.policies.target_tracking import TargetTracking, TargetTrackingParameters
from policy.scaling.policies.token_saturation import TokenSaturation, TokenSaturationParameters
from policy.scaling.view import Policy

P = TypeVar("P", bound=Section)

CUSTOM = "custom"
# A module, or the file that the command line has found beside the document.
_CLASS = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|/[^:]+\.py):[A-Za-z_]\w*")
_CLASS_FORM = "module:Class, as in my_policies:Steps"


class _Kind:
    """The parameters of one policy, and its constructor."""

    def __init__(self, parameters: type[P], make: Callable[[P], Policy]) -> None:
        self.parameters: type[Section] = parameters
        self.make: Callable[[Any], Policy] = make


_KINDS = {
    "static": _Kind(StaticParameters, Static),
    "target_tracking": _Kind(TargetTrackingParameters, TargetTracking),
    "panic_window": _Kind(PanicWindowParameters, PanicWindow),
    "token_saturation": _Kind(TokenSaturationParameters, TokenSaturation),
    "predictive": _Kind(PredictiveParameters, Predictive),
}
NAMES = tuple(_KINDS)


class PolicyChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A policy: its ``name`` and ``parameters``, or the class and arguments of a ``custom`` one."""

    name: str
    parameters: Section | None = None
    class_path: str = ""
    arguments: dict[str, Any] = {}

    @property
    def label(self) -> str:
        """Its name in decisions and their journal."""
        return self.class_path or self.name


def choose(path: str, raw: object) -> PolicyChoice:
    """The choice at ``path`` of the config; raises :class:`policy.errors.ConfigError`."""
    if isinstance(raw, str):
        return _chosen(path, path, raw, None)
    if not isinstance(raw, Mapping) or len(raw) != 1:
        raise ConfigError(path, raw, "the name of a policy, or a mapping of that one name to its parameters")
    ((name, parameters),) = raw.items()
    return _chosen(path, f"{path}.{name}", name, parameters)


def make(chosen: PolicyChoice) -> Policy:
    """The built-in policy that was chosen; users' own classes are loaded by
    :mod:`serve.autoscaler.custom_policy`."""
    return _KINDS[chosen.name].make(chosen.parameters)


def _chosen(path: str, inner: str, name: object, parameters: object) -> PolicyChoice:
    if name == CUSTOM:
        return _custom(inner, parameters)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if not isinstance(name, str) or kind is None:
        known = [*NAMES, CUSTOM]
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(path, name, f"one of the policies: {', '.join(known)}{hint}")
    # A name with nothing after its colon has default parameters.
    given = {} if parameters is None else parameters
    return PolicyChoice(name=name, parameters=convert(given, kind.parameters, inner))


def _custom(path: str, parameters: object) -> PolicyChoice:
    if not isinstance(parameters, Mapping):
        return PolicyChoice(name=CUSTOM, class_path=_class_path(path, parameters))
    class_path = _class_path(f"{path}.class", parameters.get("class"))
    arguments = {key: value for key, value in parameters.items() if key != "class"}
    for key, value in arguments.items():
        if not isinstance(key, str) or not key.isidentifier():
            raise ConfigError(f"{path}.{key}", value, "a name of an argument of the class as the key")
    return PolicyChoice(name=CUSTOM, class_path=class_path, arguments=arguments)


def _class_path(path: str, value: object) -> str:
    if not isinstance(value, str) or not _CLASS.fullmatch(value):
        raise ConfigError(path, value, _CLASS_FORM)
    return value
