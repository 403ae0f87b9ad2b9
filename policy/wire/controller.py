"""The controller's HTTP API as other processes use it: paths, requests to add an adapter, and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from msgspec import Meta

from policy.errors import (
    AccessRefused,
    AccessUnknown,
    AdapterRefused,
    AdapterUnknown,
    ConfigError,
    ModelUnavailable,
    NotLeader,
    PreconditionFailed,
    SwitchRefused,
    TargetError,
    TidegateError,
    Unauthorized,
    Unreachable,
)
from policy.wire.adapter_catalog import Alias

FLEET: Final = "/fleet"
FLEET_STREAM: Final = FLEET + "/stream"
ADAPTERS: Final = "/adapters"
ADAPTERS_STREAM: Final = ADAPTERS + "/stream"
STATUS: Final = "/status"
DOCUMENT: Final = "/document"
GPUS: Final = "/gpus"
DECISIONS: Final = "/decisions"
HISTORY: Final = "/history"
LIVE: Final = "/live"
SCALE: Final = "/scale"
MODE: Final = "/mode"
STEPS: Final = "/steps"
METRICS: Final = "/metrics"
REPLICAS: Final = "/replicas"
SIGNALS: Final = "/signals"
# Answered by a controller that stands by, too.
LEADER: Final = "/leader"


class LeaderStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller at ``address`` knows of the election: whether it ``leads``, or who does.

    ``term`` counts the leaders. The lease of the ``leader`` (an address, empty if none is known) was renewed
    ``renewed_s`` seconds ago, and ends ``lease_s`` seconds after a renewal. ``trouble`` says why the lease
    cannot be read or written. One that is ``ending`` does not answer for the replicas any more.
    """

    address: str
    leads: bool
    leader: str = ""
    term: int = 0
    lease_s: float = 0.0
    renewed_s: float | None = None
    trouble: str = ""
    ending: bool = False


class Controllers:
    """The addresses in ``HOST:PORT[,HOST:PORT]``, from the controller on that answered last."""

    def __init__(self, addresses: str) -> None:
        self.all = tuple(address.strip() for address in addresses.split(","))
        self._first = 0

    @property
    def first(self) -> str:
        """The one to ask first."""
        return self.all[self._first]

    def in_turn(self) -> tuple[str, ...]:
        """All of them, each once."""
        return self.all[self._first :] + self.all[: self._first]

    def answered(self, address: str) -> None:
        """The controller at ``address`` leads."""
        self._first = self.all.index(address)

    def failed(self, address: str) -> None:
        """The controller at ``address`` does not lead: another one is asked first."""
        if address == self.first:
            self._first = (self._first + 1) % len(self.all)


def adapter_path(model: str, name: str, change: str = "") -> str:
    """The path of an adapter, or of a ``change`` of it: ``split`` or ``rollback``."""
    return f"{ADAPTERS}/{quote(model, safe='')}/{quote(name, safe='')}{'/' + change if change else ''}"


def with_query(path: str, **parameters: str | float | None) -> str:
    """``path`` with the parameters that are not ``None`` as its query."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


class AddAdapterRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter to add, to ``model`` or else to the only model that takes adapters.

    ``tenants`` may see it; ``None`` leaves them as they are (a new adapter: all), an empty tuple is
    all. ``weight`` is the percentage of the name's requests that it serves, ``None`` for all. ``force``
    takes an adapter that names another base model. Unknown keys are refused: a misspelt ``tenants`` would
    show the adapter to all tenants.
    """

    name: str
    source: str
    model: str | None = None
    tenants: tuple[str, ...] | None = None
    weight: Annotated[float, Meta(ge=0, le=100)] | None = None
    force: bool = False


class RollbackRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Return a name to its previous split, or to the version ``to`` (``v1``) alone."""

    to: str | None = None


class ErrorDetails(msgspec.Struct, frozen=True, kw_only=True):
    """An error: ``type`` is its class, ``code`` that of a :class:`policy.errors.AdapterRefused`."""

    type: str
    message: str
    code: str = ""


class AddAdapterLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the answer to an add: the ``step``, and ``done`` of ``total`` if that is known.

    The last line has the ``alias``, once it is durable, or an ``error``.
    """

    step: str = ""
    message: str = ""
    done: int = 0
    total: int | None = None
    alias: Alias | None = None
    error: ErrorDetails | None = None


class ErrorAnswer(NamedTuple):
    """How an error is answered: the controller's status, and status and code of the gateway's admin port."""

    status: int
    admin_status: int
    code: str


# By class of the error.
ERROR_ANSWERS = {
    # An adapter that is not valid; the admin port uses its own code, such as ``rank``.
    "AdapterRefused": ErrorAnswer(400, 400, "refused"),
    # A body that cannot be decoded.
    "BadRequest": ErrorAnswer(400, 400, "bad_request"),
    # No such adapter or version.
    "AdapterUnknown": ErrorAnswer(404, 404, "adapter_not_found"),
    # No such tenant or key, and a change of them that is not allowed in the present state.
    "AccessUnknown": ErrorAnswer(404, 404, "not_found"),
    "AccessRefused": ErrorAnswer(409, 409, "not_allowed"),
    # A value that is never allowed, and an operation that is not allowed in the present state.
    "ConfigError": ErrorAnswer(409, 400, "bad_value"),
    "TargetError": ErrorAnswer(409, 409, "not_allowed"),
    # None of the controllers leads at the moment.
    "NotLeader": ErrorAnswer(503, 503, "no_leader"),
    # The controller's database does not answer, or its machine lacks something, such as disk space.
    "Unreachable": ErrorAnswer(409, 503, "unreachable"),
    "PreconditionFailed": ErrorAnswer(409, 503, "precondition_failed"),
}
OTHER_ERROR = ErrorAnswer(409, 502, "controller_failed")

_CLASSES: dict[str, type[TidegateError]] = {
    kind.__name__: kind
    for kind in (
        *(TargetError, SwitchRefused, AdapterUnknown, AccessUnknown, AccessRefused),
        *(ModelUnavailable, NotLeader, PreconditionFailed, Unauthorized, Unreachable),
    )
}


def answer_of(kind: str) -> ErrorAnswer:
    """How an error of the class ``kind`` is answered."""
    return ERROR_ANSWERS.get(kind, OTHER_ERROR)


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
