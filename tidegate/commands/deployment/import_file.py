"""``import``: a deployment file from the configuration of another server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from store.yaml_file import read_yaml
from tidegate.commands.options import FILE, OutputFile
from tidegate.importers.litellm import from_litellm
from tidegate.importers.production_stack import from_production_stack
from tidegate.importers.vllm_flags import ImportedDeployment
from tidegate.importers.write_document import write_document

_Read = Callable[[dict[str, Any]], ImportedDeployment]
_SOURCES: dict[str, tuple[str, _Read]] = {
    "litellm": ("model_list", from_litellm),
    "vllm-production-stack": ("servingEngineSpec", from_production_stack),
}


@click.command(
    "import",
    help="Write a deployment file from FILE of another server.\n\n"
    "litellm: its config.yaml. vllm-production-stack: the values of its Helm chart. What has no counterpart"
    " is printed, line by line.",
)
@click.argument("source", type=click.Choice(list(_SOURCES)))
@click.argument("file", type=FILE)
@click.option("--output", type=OutputFile(), default=Path("tidegate.yaml"), show_default=True)
@click.option("--force", is_flag=True, help="Replace a file with another content.")
def import_file(source: str, file: Path, output: Path, *, force: bool) -> None:
    key, read = _SOURCES[source]
    translation = read(read_yaml(file, key))
    write_document(output, translation.document, f"From {file.name} of {source}.", force=force)
    for note in translation.notes:
        click.echo(f"Note: {note}.")
    click.echo(f"Wrote {output}: tidegate check {output}")
