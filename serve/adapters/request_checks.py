"""What people ask of adapters, checked before anything is done about it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from policy.errors import AdapterRefused, ConfigError
from policy.wire.catalog import NAME
from policy.wire.controller import AddRequest

_VERSION = re.compile(r"v([1-9][0-9]{0,8})")


def check_add(wanted: AddRequest, models: Collection[str], tenants: Collection[str]) -> None:
    """Refuse an adapter that cannot be added to a document with these ``models`` and ``tenants``.

    Raises :class:`AdapterRefused` for a name that cannot be one, and :class:`ConfigError` for other values.
    """
    if NAME.fullmatch(wanted.name) is None:
        expected = f"expected a name that matches {NAME.pattern}"
        raise AdapterRefused("name", f"name: got {wanted.name[:200]!r}, {expected}")
    if wanted.name in models:
        raise AdapterRefused("name", f"name: got {wanted.name!r}, expected a name that no model has")
    if not wanted.source:
        raise ConfigError("source", wanted.source, "a path, https://, hf:ORG/NAME or another URL")
    for tenant in wanted.tenants or ():
        if tenant not in tenants:
            known = ", ".join(tenants) or "none, for the document has no tenants"
            raise ConfigError("tenants", tenant, f"one of the document's tenants: {known}")


def weights_by_number(weights: Mapping[str, float]) -> dict[int, float]:
    """The weights of the versions ``v1`` and so on; raises :class:`ConfigError` for such that are none."""
    numbers = {}
    for version, weight in weights.items():
        if (match := _VERSION.fullmatch(version)) is None or not 0 <= weight < float("inf"):
            raise ConfigError("split", {version: weight}, "versions such as v1, each with a weight from 0")
        numbers[int(match[1])] = weight
    if not any(numbers.values()):
        raise ConfigError("split", dict(weights), "at least one weight above 0")
    return numbers
