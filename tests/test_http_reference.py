"""docs/http.md has the paths of both ports' schemas; `python -m tests.test_http_reference` writes it anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gateway.api.application import admin_app, client_app
from policy.config.deployment import GatewayConfig
from tests.generated_page import GeneratedPage

PAGE = GeneratedPage("http.md", "## Client port\n")
# All requests to engines have the same headers and refusals.
LIKE_ALL = "/v1/chat/completions"


def reference() -> str:
    """The generated part of the page."""
    unused: Any = SimpleNamespace()
    client = client_app(unused, lambda *asgi: unused).openapi()
    admin = admin_app(unused, str, GatewayConfig).openapi()
    operation = client["paths"][LIKE_ALL]["post"]
    headers = [(f"`{each['name']}`", each["description"]) for each in operation["parameters"]]
    answers = [
        (status, _sentence(answer["description"]), ", ".join(f"`{name}`" for name in answer["headers"]))
        for status, answer in operation["responses"].items()
    ]
    sent = {
        name: header["description"]
        for answer in operation["responses"].values()
        for name, header in answer["headers"].items()
    }
    return (
        _table(("Path", "What it does"), _paths(client))
        + "\n### Request headers\n\nAll are optional.\n"
        + _table(("Header", "Meaning"), headers)
        + "\n### Answers\n"
        + _table(("Status", "Meaning", "Headers"), answers)
        + _table(("Header", "Meaning"), [(f"`{name}`", text) for name, text in sent.items()])
        + "\n## Admin port\n"
        + _table(("Path", "What it does"), _paths(admin))
    )


def _paths(schema: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (f"`{method.upper()} {path}{_query(operation)}`", _meaning(operation))
        for path, operations in schema["paths"].items()
        for method, operation in operations.items()
    ]


def _query(operation: dict[str, Any]) -> str:
    names = [each["name"] for each in operation.get("parameters", ()) if each["in"] == "query"]
    return f"?{'&'.join(names)}" if names else ""


def _meaning(operation: dict[str, Any]) -> str:
    parameters = [
        f"`{each['name']}`: {each['description']}"
        for each in operation.get("parameters", ())
        if each["in"] == "query" and "description" in each
    ]
    texts = [operation["summary"], operation.get("description", "").replace("``", "`"), *parameters]
    return " ".join(_sentence(text) for text in texts if text)


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_page_has_the_paths_of_both_ports() -> None:
    assert PAGE.generated == reference()


if __name__ == "__main__":
    PAGE.write(reference())
