"""The exceptions of Tidegate, and the reasons for refusing a request.

``Refusal`` is the closed set of reasons why a request is not served; only the gateway's edge maps it to HTTP.
"""

from __future__ import annotations

from enum import StrEnum


class TidegateError(Exception):
    """The base class of all exceptions of Tidegate."""


class ConfigError(TidegateError):
    """``path`` (dotted, as in the YAML) holds ``value``, and ``expected`` describes the valid values."""

    def __init__(self, path: str, value: object, expected: str) -> None:
        self.path = path
        self.value = value
        self.expected = expected
        super().__init__(f"{path}: got {value!r}, expected {expected}")


class TraceError(TidegateError):
    """Line ``line`` (from 1) of the trace at ``path`` has ``value`` in place of ``expected``."""

    def __init__(self, path: str, line: int, value: object, expected: str) -> None:
        self.path = path
        self.line = line
        self.value = value
        self.expected = expected
        super().__init__(f"{path}:{line}: got {value!r}, expected {expected}")


class TargetError(TidegateError):
    """The deployment does not allow the desired replica count or mode."""


class SwitchRefused(TidegateError):
    """The mode switch would interrupt streams or exceed queue timeouts; the message has the details."""


class ModelUnavailable(TidegateError):
    """The weights could not be fetched, converted or verified."""


class AdapterRefused(TidegateError):
    """An adapter was not admitted, or an engine could not load it; ``code`` is stable and names the cause."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(message)


class AdapterUnknown(TidegateError):
    """No adapter has this name, or it has no such version."""


class AccessUnknown(TidegateError):
    """No tenant or key has this name or id."""


class AccessRefused(TidegateError):
    """The present tenants and keys do not allow the change."""


class EngineFailed(TidegateError):
    """An engine did not become ready, or died."""


class ActuatorFailed(TidegateError):
    """The actuator could not carry out a step."""


class Unreachable(TidegateError):
    """A controller, supervisor or replica did not answer."""


class NotLeader(Unreachable):
    """Another controller leads: this one stands by, or was deposed, and what it orders is refused."""


class Unauthorized(Unreachable):
    """A process of another deployment answered: its internal secret is another one."""


class PreconditionFailed(TidegateError):
    """A port that is taken, too little memory, or a Ray cluster that Tidegate does not own."""


class Refusal(StrEnum):
    """Why a request is not served (closed: a new reason is a new member)."""

    BUSY = "busy"
    DRAINING = "draining"
    STARTING = "starting"
    RATE_LIMITED = "rate_limit_exceeded"
    QUEUE_FULL = "queue_full"
    OVERLOADED = "overloaded"
    DEADLINE = "deadline"
    NO_REPLICA = "no_replica"
    EXHAUSTED = "exhausted"
    UPSTREAM_FAILED = "upstream_failed"
    UPSTREAM_SILENT = "upstream_silent"
    ADAPTER_FAILED = "adapter_failed"
    STREAM_BROKEN = "stream_broken"
    REPLICA_LOST = "replica_lost"
    INTERNAL = "internal"
    BAD_REQUEST = "bad_request"
    UNKNOWN_MODEL = "unknown_model"
    UNSUPPORTED = "unsupported"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    TOO_LARGE = "too_large"
    ENCODED = "unsupported_encoding"
    HEAD_TOO_LARGE = "head_too_large"
    TOO_SLOW = "too_slow"
    UNAUTHORIZED = "unauthorized"
    SHUTTING_DOWN = "shutting_down"
