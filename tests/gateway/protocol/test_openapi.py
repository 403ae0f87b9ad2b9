"""The schema names every path, every header and every refusal of the client port."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.call import _WANTED
from gateway.protocol.errors import TABLE
from gateway.protocol.openapi import add_client_schema
from gateway.protocol.paths import ROUTES


@pytest.fixture
def schema() -> dict[str, Any]:
    framework = {"$ref": "#/components/schemas/HTTPValidationError"}
    schema: dict[str, Any] = {
        "paths": {"/livez": {"get": {"responses": {"200": {}, "422": framework}}}},
        "components": {"schemas": {"HTTPValidationError": {}, "ValidationError": {}}},
    }
    add_client_schema(schema)
    return schema


def test_every_route_is_there_beside_what_was(schema: dict[str, Any]) -> None:
    assert set(schema["paths"]) == {"/livez", *ROUTES, "/v1/models", "/v1/models/{id}"}


def test_the_admin_ports_errors_are_in_our_envelope(schema: dict[str, Any]) -> None:
    responses = schema["paths"]["/livez"]["get"]["responses"]
    assert set(responses) == {"200", "default"}
    reference = responses["default"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/Error"
    assert set(schema["components"]["schemas"]) == {"Error", "AnthropicError"}


@pytest.mark.parametrize("path", ROUTES)
def test_every_refusal_is_named_with_its_code(schema: dict[str, Any], path: str) -> None:
    answers = schema["paths"][path]["post"]["responses"]
    assert set(answers) == {"200", *(str(answer.status) for answer in TABLE.values())}
    for answer in TABLE.values():
        said = answers[str(answer.status)]
        assert (answer.code or "null") in said["description"]
        assert ("retry-after" in said["headers"]) == (answer.status in (429, 503))
    reference = answers["401"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    assert reference == ("AnthropicError" if path == "/v1/messages" else "Error")
    assert reference in schema["components"]["schemas"]


def test_every_header_that_is_read_is_told(schema: dict[str, Any]) -> None:
    operation = schema["paths"]["/v1/chat/completions"]["post"]
    told = {parameter["name"].encode() for parameter in operation["parameters"]}
    keys = {b"authorization", b"x-api-key"}
    assert told | keys | {b"accept", b"anthropic-version"} == _WANTED
    assert operation["security"] == [{}, {"bearer": []}, {"key": []}]
    assert set(schema["components"]["securitySchemes"]) == {"bearer", "key"}


def test_every_header_of_an_answer_is_told(schema: dict[str, Any]) -> None:
    headers = schema["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["headers"]
    assert {"x-request-id", "x-tidegate-replica", "x-tidegate-explain"} <= set(headers)


def test_describing_twice_is_describing_once(schema: dict[str, Any]) -> None:
    before = repr(schema)
    add_client_schema(schema)
    assert repr(schema) == before
