"""Refusals on the wire: one table from reasons to HTTP, and the two error envelopes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from gateway.protocol.paths import ApiDialect, ProxyRoute
from policy.errors import Refusal, TidegateError

# Of a message, in bytes of JSON: an error takes 4 KiB at most, also where it has the message twice.
MAX_MESSAGE: Final = 1536
MAX_PARAM: Final = 256
MAX_CODE: Final = 64
# A longer error of an upstream is not decoded, which would make objects of all that it holds.
MAX_ERROR_BYTES: Final = 64 * 1024
MAX_RETRY_AFTER_S: Final = 120


class RefusalResponse(NamedTuple):
    """Status, OpenAI's ``type`` and ``code``, and the seconds after which a retry makes sense."""

    status: int
    type: str
    code: str | None
    retry_after_s: int | None = None


TABLE: dict[Refusal, RefusalResponse] = {
    Refusal.BAD_REQUEST: RefusalResponse(400, "invalid_request_error", None),
    Refusal.UNSUPPORTED: RefusalResponse(400, "invalid_request_error", "unsupported"),
    Refusal.ADAPTER_FAILED: RefusalResponse(400, "invalid_request_error", "adapter_failed"),
    Refusal.UNAUTHORIZED: RefusalResponse(401, "authentication_error", "invalid_api_key"),
    Refusal.UNKNOWN_MODEL: RefusalResponse(404, "invalid_request_error", "model_not_found"),
    Refusal.NOT_FOUND: RefusalResponse(404, "invalid_request_error", "not_found"),
    Refusal.METHOD_NOT_ALLOWED: RefusalResponse(405, "invalid_request_error", "method_not_allowed"),
    Refusal.TOO_SLOW: RefusalResponse(408, "invalid_request_error", "request_timeout"),
    Refusal.TOO_LARGE: RefusalResponse(413, "invalid_request_error", "request_too_large"),
    Refusal.ENCODED: RefusalResponse(415, "invalid_request_error", "unsupported_encoding"),
    Refusal.HEAD_TOO_LARGE: RefusalResponse(431, "invalid_request_error", "head_too_large"),
    Refusal.RATE_LIMITED: RefusalResponse(429, "rate_limit_error", "rate_limit_exceeded", 1),
    Refusal.QUEUE_FULL: RefusalResponse(429, "rate_limit_error", "queue_full", 1),
    Refusal.REPLICA_LOST: RefusalResponse(500, "server_error", "replica_lost"),
    Refusal.INTERNAL: RefusalResponse(500, "server_error", "internal_error"),
    Refusal.UPSTREAM_FAILED: RefusalResponse(502, "server_error", "upstream_failed"),
    Refusal.UPSTREAM_SILENT: RefusalResponse(504, "server_error", "upstream_silent"),
    Refusal.STREAM_BROKEN: RefusalResponse(502, "server_error", "stream_broken"),
    Refusal.BUSY: RefusalResponse(503, "server_error", "busy", 1),
    Refusal.DRAINING: RefusalResponse(503, "server_error", "draining", 1),
    Refusal.STARTING: RefusalResponse(503, "server_error", "starting", 5),
    Refusal.OVERLOADED: RefusalResponse(503, "server_error", "overloaded", 1),
    Refusal.DEADLINE: RefusalResponse(503, "server_error", "deadline", 5),
    Refusal.NO_REPLICA: RefusalResponse(503, "server_error", "no_replica", 5),
    Refusal.EXHAUSTED: RefusalResponse(503, "server_error", "exhausted", 1),
    Refusal.SHUTTING_DOWN: RefusalResponse(503, "server_error", "shutting_down", 1),
}

_ANTHROPIC: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# The fleet has no capacity in time; errors that a replica reports about a request are not among them.
NO_ROOM: Final = frozenset({Refusal.QUEUE_FULL, Refusal.OVERLOADED, Refusal.DEADLINE, Refusal.NO_REPLICA})

# Shorter ones are within the bounds whatever they are made of.
_SURELY_SHORT: Final = MAX_MESSAGE // 6
_SHORT_PARAM: Final = MAX_PARAM // 6


def _without_module(run: re.Match[str]) -> str:
    """A run of what paths are made of, without the path of a module of Python (its group)."""
    path = run[1]
    if path is None:
        return run[0]
    begin = path.rfind("//") + 1
    name = path[begin:].lstrip("/-")
    return path[: len(path) - len(name)] + "[path]" if "/" in name else run[0]


# Of what an upstream says, this is no client's business: addresses, files, keys and its program. No pattern
# tries the same characters from several places, which takes 300 ms of 6 KB.
_TRACEBACK: Final = "Traceback (most recent call last)"
_INTERNALS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]{1,15}://[^\s'\"<>]+"), "[URL]"),
    (re.compile(r"\b(?:sk|hf|tg)[-_][A-Za-z0-9_-]{8,}|\b[Bb]earer\s+\S+"), "[key]"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d{1,5})?|\blocalhost:\d{1,5}\b"), "[address]"),
    (re.compile(r"\[[0-9A-Fa-f]*+:[0-9A-Fa-f:]++\](?::\d{1,5})?"), "[address]"),
    (
        re.compile(
            r"(?<![\w:])(?:(?:[0-9A-Fa-f]{1,4}:){4,7}[0-9A-Fa-f:]*|::1\b|f[cde][0-9a-f]{2}:[0-9A-Fa-f:]+)"
        ),
        "[address]",
    ),
    (re.compile(r"\b0x[0-9A-Fa-f]{6,}\b"), "[address]"),
    # Of two names at least, and no path of ours.
    (re.compile(r"(?<![\w/.])(?!/v1/)[~.]{0,2}/(?:[\w.@+-]+/)+[\w.@+-]*"), "[path]"),
    (re.compile(r"\b[A-Za-z]:\\\S+"), "[path]"),
    (re.compile(r"((?:[\w-]*+/)++[\w-]++)\.py\b|[\w/-]++"), _without_module),
)

# The names of an engine's own classes, which stand for the branches of a union.
_CLASS: Final = re.compile(r"[A-Z]\w*")
_CAUSE: Final = re.compile(r"[a-z][a-z_]{0,39}")
_ADAPTER: Final = re.compile(r"\blora|\badapter|add_lora|max_lora_rank", re.IGNORECASE)
_NOT_LOADED: Final = re.compile(
    r"load|add_lora|not found|cannot be found|no adapter|rank|unsupported", re.IGNORECASE
)


class Refused(TidegateError):
    """A request that is not served. ``status``, ``code`` and ``retry_after_s`` override the table.

    Seconds are rounded up to a whole number from 1 to :data:`MAX_RETRY_AFTER_S`. ``limits`` are the headers
    that show what is left of the client's limits.
    """

    def __init__(
        self,
        reason: Refusal,
        message: str,
        *,
        param: str | None = None,
        status: int | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        answer = TABLE[reason]
        self.reason = reason
        self.message = message if len(message) < _SURELY_SHORT else _cut(message, MAX_MESSAGE)
        self.param = param if param is None or len(param) < _SHORT_PARAM else _cut(param, MAX_PARAM)
        self.status = status or answer.status
        self.type = answer.type if self.status == answer.status else _type_of(self.status)
        self.code = _cut(code, MAX_CODE) if code else answer.code
        self.final = final
        self.limits: list[tuple[bytes, bytes]] = []
        wait = answer.retry_after_s if retry_after_s is None else retry_after_s
        if wait is None and self.status in (429, 503):
            wait = 1
        self.retry_after_s = None if wait is None else max(1, math.ceil(min(MAX_RETRY_AFTER_S, wait)))

    def body(self, *, anthropic: bool = False) -> bytes:
        """The JSON body, in Anthropic's envelope if asked."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if anthropic:
            error["type"] = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else self.type)
            return msgspec.json.encode({"type": "error", "error": error})
        return msgspec.json.encode({"error": error})

    def event(self, api: ApiDialect) -> bytes:
        """The error event of a stream of ``api``."""
        if api is ApiDialect.OPENAI:
            return b"data: " + self.body() + b"\n\n"
        if api is ApiDialect.MESSAGES:
            return b"event: error\ndata: " + self.body(anthropic=True) + b"\n\n"
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        event = {**error, "type": "error", "error": error}
        return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of the answer, without its length."""
        headers = [(b"content-type", b"application/json"), *self.limits]
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.reason is Refusal.ENCODED:
            headers.append((b"accept-encoding", b"identity"))
        if self.final:
            headers.append((b"x-should-retry", b"false"))
        if self.reason is Refusal.TOO_LARGE:
            headers.append((b"connection", b"close"))
        return headers


def _cut(text: str, most: int) -> str:
    """The begin of ``text`` that takes at most ``most`` bytes as JSON."""
    text = text[:most]
    while len(msgspec.json.encode(text)) > most:
        text = text[: len(text) * 3 // 4]
    return text


def shown(message: str) -> str:
    """An upstream's ``message`` as clients are told it: without addresses, paths, keys and tracebacks."""
    message = message[: 4 * MAX_MESSAGE]
    if (at := message.find(_TRACEBACK)) >= 0:
        message = message[:at].rstrip()
    for pattern, instead in _INTERNALS:
        message = pattern.sub(instead, message)
    return message


def shown_failure(payload: bytes) -> bytes:
    """A ``payload`` of the API of responses, an answer or an event, as clients may see its error."""
    try:
        answer = _decoded(payload)
        errors = [holder.get("error") for holder in (answer, answer.get("response")) if holder]
        told = [str(error["message"]) for error in errors if error and "message" in error]
        if all(message == shown(message) for message in told):
            return payload
        for error in errors:
            if error and "message" in error:
                error["message"] = shown(str(error["message"]))[:MAX_MESSAGE]
    except (ValueError, RecursionError, AttributeError, TypeError):
        return payload
    return msgspec.json.encode(answer)


def _type_of(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def unknown(model: str) -> Refused:
    """There is no model or adapter of this name, or the caller may not see it."""
    return Refused(Refusal.UNKNOWN_MODEL, f"The model '{model[:128]}' does not exist.", param="model")


def from_upstream(status: int, body: bytes, retry_after: bytes | None, route: ProxyRoute) -> Refused:
    """An upstream's 4xx in our envelope: integer codes become null, known texts a code.

    ``route`` names what the answer leaves out: the path, and the field of a prompt that is too long.
    """
    message, param, code = read_error(body)
    wait = int(retry_after) if retry_after is not None and retry_after.isdigit() else None
    if status in (404, 405) and (not message or message in ("Not Found", "Method Not Allowed")):
        return Refused(Refusal.UNSUPPORTED, f"{route.path} is not served by this model's engine.")
    message = shown(message) or f"{route.path} was refused with status {status}."
    if code is None and "context length" in message:
        code = "context_length_exceeded"
        param = route.prompt
    if code is None and status == 404:
        code = "model_not_found"
    return Refused(Refusal.BAD_REQUEST, message, param=param, status=status, code=code, retry_after_s=wait)


def adapter_failure(body: bytes) -> Refused | None:
    """The refusal for an upstream's 500 about an adapter that cannot be loaded, which no retry helps.

    The engine's text is replaced, since it may name files.
    """
    message, _, _ = read_error(body)
    if not _ADAPTER.search(message) or not _NOT_LOADED.search(message):
        return None
    return Refused(Refusal.ADAPTER_FAILED, "The adapter could not be loaded by the engine.", param="model")


def cause_of(body: bytes) -> str:
    """Why a replica of ours could not load an adapter: the code that its message begins with."""
    message, _, _ = read_error(body)
    code = message.partition(":")[0]
    return code if _CAUSE.fullmatch(code) else ""


def denies_model(body: bytes) -> bool:
    """Whether an upstream's 404 says that it does not serve the model."""
    message, param, code = read_error(body)
    return code == "model_not_found" or param == "model" or "model" in message.lower()


def status_of(body: bytes) -> int:
    """The status that an upstream's error names as its integer ``code``; 0 if it names none."""
    try:
        code = _decoded(body)["error"]["code"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return 0
    return code if isinstance(code, int) else 0


def read_error(body: bytes) -> tuple[str, str | None, str | None]:
    """Message, param and code (strings only) of whatever an upstream calls an error."""
    try:
        raw = _decoded(body)
    except (ValueError, RecursionError):
        return "", None, None
    error = raw.get("error", raw) if isinstance(raw, dict) else {}
    if isinstance(error, str):
        return error, None, None
    if not isinstance(error, dict):
        return "", None, None
    message = error.get("message", error.get("detail"))
    param, code = error.get("param"), error.get("code")
    return (
        message if isinstance(message, str) else "",
        _field(param) if isinstance(param, str) else None,
        code if isinstance(code, str) else None,
    )


def _decoded(body: bytes) -> Any:
    if len(body) > MAX_ERROR_BYTES:
        raise ValueError
    return msgspec.json.decode(body)


def _field(location: str) -> str | None:
    """A parameter as clients write it: of ``body.messages.0.SomeParam.role`` this is ``messages.0.role``."""
    parts = location.split(".")
    if parts[0] == "body":
        parts = [part for part in parts[1:] if not _CLASS.fullmatch(part)]
    return ".".join(parts) or None
