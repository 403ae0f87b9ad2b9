"""The controller's HTTP API as other processes use it: paths, requests to add an adapter, and errors.

=====================  ==========  ==========  =======================  ==================================
class of the error     controller  admin port  code at the admin port   meaning
=====================  ==========  ==========  =======================  ==================================
`AdapterRefused`       400         400         its own, as ``rank``     the adapter is not valid
`BadRequest`           400         400         ``bad_request``          the body cannot be decoded
`AdapterUnknown`       404         404         ``adapter_not_found``    no such adapter or version
`ConfigError`          409         400         ``bad_value``            a value that is never allowed
`TargetError`          409         409         ``not_allowed``          not allowed in the present state
`Unreachable`          409         503         ``unreachable``          its database does not answer
`PreconditionFailed`   409         503         ``precondition_failed``  as a full disk on its machine
any other              409         502         ``controller_failed``
=====================  ==========  ==========  =======================  ==================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from policy.errors import (
    AdapterRefused,
    AdapterUnknown,
    ConfigError,
    ModelUnavailable,
    PreconditionFailed,
    SwitchRefused,
    TargetError,
    TidegateError,
    Unreachable,
)
from policy.wire.catalog import Alias

FLEET: Final = "/fleet"
FLEET_STREAM: Final = "/fleet/stream"
STATUS: Final = "/status"
DECISIONS: Final = "/decisions"
STEPS: Final = "/steps"
REPLICAS: Final = "/replicas"
SIGNALS: Final = "/signals"
ADAPTERS: Final = "/adapters"
ADAPTERS_STREAM: Final = "/adapters/stream"


def adapter_path(model: str, name: str, change: str = "") -> str:
    """The path of an adapter, or of a ``change`` of it: ``split`` or ``rollback``."""
    return f"{ADAPTERS}/{quote(model, safe='')}/{quote(name, safe='')}{'/' + change if change else ''}"


def with_query(path: str, **parameters: str | float | None) -> str:
    """``path`` with the parameters that are not ``None`` as its query."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to add, to ``model`` or else to the only model that takes adapters.

    ``tenants`` may see it; ``None`` leaves them as they are (a new adapter: everybody), an empty tuple is
    everybody. Unknown keys are refused: a misspelt ``tenants`` would show the adapter to everybody.
    """

    name: str
    source: str
    model: str | None = None
    tenants: tuple[str, ...] | None = None


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error: ``type`` is its class, ``code`` that of a :class:`policy.errors.AdapterRefused`."""

    type: str
    message: str
    code: str = ""


class AddLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the answer to an add: the ``step``, and ``done`` of ``total`` if that is known.

    The last line has the ``alias``, once it is durable, or an ``error``.
    """

    step: str = ""
    message: str = ""
    done: int = 0
    total: int | None = None
    alias: Alias | None = None
    error: Problem | None = None


class AdminError(NamedTuple):
    """How the gateway's admin port answers an error of the controller."""

    status: int
    code: str


ADMIN_ERRORS = {
    "AdapterRefused": AdminError(400, "refused"),
    "ConfigError": AdminError(400, "bad_value"),
    "BadRequest": AdminError(400, "bad_request"),
    "AdapterUnknown": AdminError(404, "adapter_not_found"),
    "TargetError": AdminError(409, "not_allowed"),
    "Unreachable": AdminError(503, "unreachable"),
    "PreconditionFailed": AdminError(503, "precondition_failed"),
}
OTHER_ERROR = AdminError(502, "controller_failed")

_CLASSES: dict[str, type[TidegateError]] = {
    kind.__name__: kind
    for kind in (
        *(TargetError, SwitchRefused, AdapterUnknown),
        *(ModelUnavailable, PreconditionFailed, Unreachable),
    )
}


def status_of(error: TidegateError) -> int:
    """The controller's HTTP status for ``error``."""
    if isinstance(error, AdapterRefused):
        return 400
    return 404 if isinstance(error, AdapterUnknown) else 409


def problem_of(error: TidegateError) -> dict[str, Any]:
    """The members of ``error`` on the wire."""
    problem: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, ConfigError):
        problem |= {"path": error.path, "value": error.value, "expected": error.expected}
    if isinstance(error, AdapterRefused):
        problem["code"] = error.code
    return problem


def error_of(problem: Mapping[str, Any], unknown: type[TidegateError] = Unreachable) -> TidegateError:
    """The error that :func:`problem_of` wrote; ``unknown`` for a class that is not in the table."""
    kind, message = problem["type"], problem["message"]
    if kind == "ConfigError":
        return ConfigError(problem["path"], problem["value"], problem["expected"])
    if kind == "AdapterRefused":
        return AdapterRefused(problem["code"], message)
    return _CLASSES.get(kind, unknown)(message)
