"""``render``: manifests of a deployment file for other machinery."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import click

from policy.config.convert import require
from policy.deployment_file.parse import parse
from store.yaml_file import read_yaml
from tidegate.commands.options import file_argument
from tidegate.commands.terminal import warn
from tidegate.kubernetes.manifests import manifests
from tidegate.kubernetes.object_metadata import ManifestOptions, as_yaml

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")


@click.group(help="Render a deployment file for other machinery.")
def render() -> None:
    """The group."""


@render.command(
    help="Print the Kubernetes manifests of FILE.\n\n"
    "Gateways in front of external models are a Deployment that scales. Models that Tidegate starts run in"
    " one pod with their GPUs or cores. What must be there beside the manifests is printed as notes."
)
@file_argument
@click.option("--name", default="tidegate", show_default=True, help="The name of all objects.")
@click.option("--namespace", default="default", show_default=True)
@click.option("--image", help="Default: tidegate:VERSION-cpu or -gpu.")
@click.option(
    "--gateways", type=click.IntRange(1, 1000), default=2, show_default=True, help="The least number."
)
@click.option(
    "--controllers",
    type=click.IntRange(1, 9),
    default=1,
    show_default=True,
    help="Of models that are scaled: 2 for one that leads and one that stands by.",
)
@click.option("--service-monitor", is_flag=True, help="With a ServiceMonitor of the Prometheus operator.")
def kubernetes(
    file: Path, name: str, namespace: str, image: str | None, *, gateways: int, controllers: int,
    service_monitor: bool,
) -> None:  # fmt: skip
    for option, value in (("--name", name), ("--namespace", namespace)):
        require(_LABEL.fullmatch(value), option, value, "lower case letters, digits and dashes")
    raw = read_yaml(file, "models")
    deployment = parse(raw)
    version = importlib.metadata.version("tidegate")
    kind = "gpu" if deployment.deploys and deployment.budget.gpus else "cpu"
    options = ManifestOptions(
        name, namespace, image or f"tidegate:{version}-{kind}", gateways, controllers, service_monitor
    )
    rendered = manifests(raw, deployment, options)
    click.echo(as_yaml(rendered.objects), nl=False)
    for note in rendered.notes:
        warn(f"Note: {note}.")
