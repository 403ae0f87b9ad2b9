"""The files for docker compose and for Ray's cluster launcher name what exists."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from tidegate.cli import group

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = ROOT / "deployments" / "compose"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<colon>:?)-(?P<default>[^}]*)\}")


def service(name: str, **variables: str) -> dict[str, Any]:
    """The only service of a file in an environment of these ``variables``."""

    def value(found: re.Match[str]) -> str:
        given = variables.get(found["name"])
        # With a colon, compose takes the default of an empty variable too.
        return found["default"] if given is None or (found["colon"] and not given) else given

    text = _VARIABLE.sub(value, (COMPOSE / name).read_text())
    (found,) = yaml.safe_load(text)["services"].values()
    return dict(found)


def test_compose_runs_a_shipped_file_with_a_command_that_exists() -> None:
    found = service("docker-compose.yaml")
    name, path, *options = found["command"]
    command = group.get_command(click.Context(group), name)
    assert command is not None
    with command.make_context(name, [path, *options], resilient_parsing=True) as context:
        assert command.make_parser(context).parse_args([path, *options])[1] == []
    folder = next(each for each in found["volumes"] if each.endswith("/etc/tidegate:ro")).split(":")[0]
    file = COMPOSE / folder / Path(path).name
    assert file.exists()
    deployment = yaml.safe_load(file.read_text())["gateway"]
    published = {f"127.0.0.1:{deployment[key]}:{deployment[key]}" for key in ("port", "admin_port")}
    assert set(found["ports"]) == published
    for volume in found["volumes"][1:]:
        assert f'"{volume.split(":")[1]}"' in DOCKERFILE


def test_clients_need_keys_where_the_variable_is_empty() -> None:
    name = "TIDEGATE_ALLOW_UNAUTHENTICATED"
    assert service("docker-compose.yaml")["environment"][name] == 1
    assert not service("docker-compose.yaml", **{name: ""})["environment"][name]


@pytest.mark.parametrize("name", ["docker-compose.yaml", "gpu.yaml"])
def test_compose_builds_a_target_of_the_dockerfile(name: str) -> None:
    build = service(name)["build"]
    assert (COMPOSE / build["context"] / "Dockerfile").samefile(ROOT / "Dockerfile")
    assert re.search(rf"^FROM .* AS {build['target']}$", DOCKERFILE, re.MULTILINE)


def test_a_token_of_hugging_face_reaches_the_container() -> None:
    # Without a value compose takes the shell's, and none where that has none.
    environment = service("docker-compose.yaml")["environment"]
    assert "HF_TOKEN" in environment
    assert environment["HF_TOKEN"] is None


def test_the_cluster_file_is_valid_for_ray() -> None:
    found = find_spec("ray")
    if found is None or found.origin is None:
        pytest.skip("Ray is not installed")
    schema = json.loads((Path(found.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load((ROOT / "deployments" / "ray" / "cluster.yaml").read_text())
    jsonschema.validate(cluster, schema)
    for commands in (cluster["head_start_ray_commands"], cluster["worker_start_ray_commands"]):
        assert "RAY_AUTH_MODE=token" in commands[-1]
        assert "RAY_worker_niceness=0" in commands[-1]
    assert cluster["max_workers"] == len(cluster["provider"]["worker_ips"])
