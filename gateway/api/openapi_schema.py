"""The OpenAPI schema of the hot routes (paths, keys, headers, every error code) and of the error envelope."""

from __future__ import annotations

from typing import Any

from gateway.intake.limit_headers import REQUESTS_HEADERS, TOKENS_HEADERS
from gateway.protocol.client_session import SESSION_HEADERS
from gateway.protocol.errors import TABLE
from gateway.protocol.paths import ROUTES, ApiDialect, ProxyRoute
from policy.wire.headers import DROPPED_HEADER, EXPLAIN_HEADER, REPLICA_HEADER

_JSON = "application/json"
_STREAM = "text/event-stream"

_TEXT = {"type": "string"}
_MODEL = {
    "type": "string",
    "description": "A model, or an adapter as NAME, BASE:NAME, or either with @ and 12 digits of a digest.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, "error": _ERROR["properties"]["error"]},  # type: ignore[index]
}
LIMIT_HEADERS = {
    name.decode(): f"{text}, where {kind} per minute are limited."
    for kind, names in (("requests", REQUESTS_HEADERS), ("tokens", TOKENS_HEADERS))
    for name, text in (
        (names.limit, "The limit"),
        (names.remaining, "What is left"),
        (names.reset, "When all is back, as 6m0s"),
    )
}
_HEADERS = {
    "x-request-id": "The id of this request; the one that the client sent, if it sent a valid one.",
    REPLICA_HEADER: "A label of the replica that answered, or upstream:NAME.",
    EXPLAIN_HEADER: "Asked for by an admin: the candidates with their predicted seconds, as JSON.",
    DROPPED_HEADER: "Fields of the body that are not known, which no replica got.",
    "traceresponse": "Of an error, where requests are traced: its trace, as in traceparent.",
    **LIMIT_HEADERS,
    "retry-after": "Seconds after which a retry makes sense, at most 120.",
    "x-should-retry": "false where a retry would do harm.",
    "www-authenticate": "Bearer.",
    "allow": "The methods of this path.",
}
_SESSION = "An id of the client's session, if it sends none of a more specific kind."
_PARAMETERS = (
    ("x-request-id", "An id of the client's: up to 128 letters, digits, - and _.", _TEXT),
    ("traceparent", "W3C trace context: the trace that the request is a part of.", _TEXT),
    ("tracestate", "W3C trace context: what tracing systems add to it.", _TEXT),
    ("x-request-timeout-s", "How many seconds the client would wait for a replica.", {"type": "number"}),
    (
        "x-session-id",
        "Requests of one session go to one replica where that costs nothing, and to one version of adapters.",
        _TEXT,
    ),
    *((name.decode(), _SESSION, _TEXT) for name in SESSION_HEADERS[1:]),
    (EXPLAIN_HEADER, "1, with a key of an admin: say in a header why the route was taken.", _TEXT),
)
# Of an adapter that no replica could load lately: no fault of the request's, whose code it is else.
_ALSO = {
    400: ["context_length_exceeded", "max_tokens_exceeded"],
    403: ["feature_not_allowed"],
    503: ["adapter_failed"],
}


def add_errors(schema: dict[str, Any]) -> None:
    """Make the OpenAPI ``schema`` of an application describe our error envelope in place of FastAPI's."""
    schemas = schema.setdefault("components", {}).setdefault("schemas", {})
    schemas["Error"] = _ERROR
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    content = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    for operations in schema["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "Refused", "content": content}


def add_hot_routes(schema: dict[str, Any]) -> None:
    """Add the hot routes to the OpenAPI ``schema`` of the client port's application."""
    components = schema["components"]
    components["schemas"]["AnthropicError"] = _ANTHROPIC_ERROR
    components.setdefault("securitySchemes", {}).update(
        bearer={"type": "http", "scheme": "bearer"},
        key={"type": "apiKey", "in": "header", "name": "x-api-key"},
    )
    schema["paths"].update({path: {"post": _operation(route)} for path, route in ROUTES.items()})


def _operation(route: ProxyRoute) -> dict[str, Any]:
    good: dict[str, Any] = {"schema": {"type": "object"}}
    content = {_JSON: good} if route.runner is None else {_JSON: good, _STREAM: {"schema": _TEXT}}
    headers = _headers("x-request-id", REPLICA_HEADER, EXPLAIN_HEADER, DROPPED_HEADER, *LIMIT_HEADERS)
    answer = {"description": "The engine's answer", "headers": headers, "content": content}
    body = {
        "type": "object",
        "required": ["model"],
        "properties": {"model": _MODEL, "stream": {"type": ["boolean", "null"]}},
    }
    return {
        "summary": route.summary,
        "security": [{}, {"bearer": []}, {"key": []}],
        "parameters": [
            {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
            for name, text, schema in _PARAMETERS
        ],
        "requestBody": {"required": True, "content": {_JSON: {"schema": body}}},
        "responses": {"200": answer, **_refusals(route)},
    }


def _refusals(route: ProxyRoute) -> dict[str, Any]:
    """The answers other than 200, each with the error codes that it may have."""
    envelope = "AnthropicError" if route.api is ApiDialect.MESSAGES else "Error"
    content = {_JSON: {"schema": {"$ref": f"#/components/schemas/{envelope}"}}}
    found = {}
    for status in sorted({*_ALSO, *(answer.status for answer in TABLE.values())}):
        codes = sorted({answer.code or "null" for answer in TABLE.values() if answer.status == status})
        codes += _ALSO.get(status, [])
        headers = ["x-request-id", REPLICA_HEADER, "traceresponse"]
        if status == 401:
            headers.append("www-authenticate")
        if status == 405:
            headers.append("allow")
        if status == 429:
            headers += LIMIT_HEADERS
        if status in (429, 503):
            headers.append("retry-after")
        if status == 429 or status >= 500:
            headers.append("x-should-retry")
        description = f"Refused; error.code is one of: {', '.join(codes)}"
        found[str(status)] = {"description": description, "headers": _headers(*headers), "content": content}
    return found


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"description": _HEADERS[name], "schema": _TEXT} for name in names}
