"""Each port's schema names its paths, headers and refusals, and describes no other port."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.application import admin_app, client_app
from gateway.api.external_metrics import GROUP, METRIC
from gateway.protocol.errors import TABLE
from gateway.protocol.paths import ROUTES, is_anthropic
from gateway.request_context import HEADERS_READ
from policy.config.deployment import GatewayConfig


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    unused: Any = SimpleNamespace()
    return client_app(unused, lambda *asgi: unused).openapi()


def test_the_client_ports_schema_has_its_paths_alone(schema: dict[str, Any]) -> None:
    assert set(schema["paths"]) == {*ROUTES, "/v1/models", "/v1/models/{name}", "/health", "/ping"}
    assert set(schema["components"]["schemas"]) == {"Error", "AnthropicError"}
    assert schema["paths"]["/v1/models"]["get"]["security"] == [{"bearer": []}, {"key": []}]


def test_the_admin_ports_schema_has_its_paths_alone() -> None:
    unused: Any = SimpleNamespace()
    schema = admin_app(unused, str, GatewayConfig).openapi()
    paths = {path for path in schema["paths"] if not path.startswith("/admin/")}
    metric = f"{GROUP}/namespaces/{{namespace}}/{METRIC}"
    assert paths == {"/livez", "/readyz", "/metrics", GROUP, metric}
    responses = schema["paths"]["/admin/routes"]["get"]["responses"]
    assert set(responses) == {"200", "default"}
    reference = responses["default"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/Error"
    assert set(schema["components"]["schemas"]) == {"Error"}
    secured = {
        path for path, verbs in schema["paths"].items() if any("security" in v for v in verbs.values())
    }
    assert secured == {path for path in schema["paths"] if path.startswith("/admin/")}


@pytest.mark.parametrize("path", ROUTES)
def test_every_refusal_is_named_with_its_code(schema: dict[str, Any], path: str) -> None:
    answers = schema["paths"][path]["post"]["responses"]
    # A key may lack a right to use a feature.
    assert set(answers) == {"200", "403", *(str(answer.status) for answer in TABLE.values())}
    assert "feature_not_allowed" in answers["403"]["description"]
    for answer in TABLE.values():
        described = answers[str(answer.status)]
        assert (answer.code or "null") in described["description"]
        assert ("retry-after" in described["headers"]) == (answer.status in (429, 503))
    reference = answers["401"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert reference == ("AnthropicError" if is_anthropic(path) else "Error")


def test_every_header_that_is_read_or_sent_is_described(schema: dict[str, Any]) -> None:
    operation = schema["paths"]["/v1/chat/completions"]["post"]
    described = {parameter["name"].encode() for parameter in operation["parameters"]}
    keys = {b"authorization", b"x-api-key"}
    others = {
        b"accept",
        b"anthropic-version",
        b"content-encoding",
        b"transfer-encoding",
        b"x-tidegate-canary",
    }
    assert described | keys | others == HEADERS_READ
    answers = operation["responses"].values()
    named = {name for answer in answers for name in answer["headers"]}
    assert {"x-tidegate-dropped-fields", "traceresponse", "x-ratelimit-reset-tokens", "allow"} <= named
    assert operation["security"] == [{}, {"bearer": []}, {"key": []}]
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "key"}
    headers = operation["responses"]["200"]["headers"]
    assert {"x-request-id", "x-tidegate-replica", "x-tidegate-explain"} <= set(headers)
