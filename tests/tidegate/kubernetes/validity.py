"""Whether objects are valid: Kubernetes' own by its schemas, others by `schemas.json`, and their commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest

from gateway.api import health, swagger_ui
from gateway.api.application import ADMIN_ROUTERS
from serve.controller.standby_controller import LIVE, READY
from tidegate.cli import group

KUBERNETES = "1.32"
_SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text())
# By the name of the port.
PATHS = {
    "admin": {route.path for router in ADMIN_ROUTERS for route in router.routes},
    "controller": {LIVE, READY},
    "http": {route.path for router in (health.router, swagger_ui.router) for route in router.routes},
}


def check(found: dict[str, Any]) -> None:
    """Raise unless ``found`` is valid; pods of other kinds' templates are checked as pods."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate").validate
    if (schema := _SCHEMAS.get(found["kind"])) is None:
        validate(found, KUBERNETES, strict=True)
        return
    jsonschema.validate(found, schema)
    for pod in pods(found):
        metadata = {"name": "pod", **pod.get("metadata", {})}
        whole = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]}
        validate(whole, KUBERNETES, strict=True)


def pods(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The templates of pods in an object."""
    for key, value in found.items():
        if key in ("template", "workerTemplate", "leaderTemplate") and "spec" in value:
            yield value
        elif isinstance(value, dict):
            yield from pods(value)
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, dict):
                    yield from pods(each)


def check_container(container: dict[str, Any]) -> None:
    """Parse the command of a container of Tidegate as it does, and look for what its probes ask."""
    command = group.get_command(click.Context(group), container["args"][0])
    assert isinstance(command, click.Command)
    with command.make_context("tidegate", container["args"][1:], resilient_parsing=True) as context:
        _, rest, _ = command.make_parser(context).parse_args(list(container["args"][1:]))
    assert rest == []
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container.get(probe, container["startupProbe"])["httpGet"]
        assert asked["path"] in PATHS[asked["port"]]
        assert asked["port"] in {port["name"] for port in container["ports"]}
