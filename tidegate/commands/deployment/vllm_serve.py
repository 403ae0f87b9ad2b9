"""``serve``: a deployment file from the flags of ``vllm serve``, and its start."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from policy.config.deployment import Cluster
from serve.actuator.gpu_cards import cards_of_machine
from tidegate.commands.deployment.up_run_down import up
from tidegate.commands.options import OutputFile
from tidegate.importers.vllm_flags import MachineResources, translate
from tidegate.importers.write_document import write_document

_CPUINFO = Path("/proc/cpuinfo")
# Without these, bfloat16 is emulated and several times slower than float32.
_BFLOAT16 = re.compile(r"\b(avx512_bf16|amx_bf16|bf16)\b")


@click.command(
    context_settings={"ignore_unknown_options": True},
    help="Serve MODEL with the flags of `vllm serve`: write the deployment file of it, and start that."
    "\n\nThe file is MODEL.yaml in the current folder; change it and `tidegate apply` it from then on.",
)
@click.option("--output", type=OutputFile(), help="The deployment file to write.")
@click.option("--force", is_flag=True, help="Replace a file with another content.")
@click.option("--write-only", is_flag=True, help="Write the file and start nothing.")
@click.option("--foreground", is_flag=True, help="Run until SIGINT or SIGTERM, as `vllm serve` does.")
@click.option("--no-ray", is_flag=True, help="Run replicas as child processes, without Ray.")
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="MODEL [VLLM'S FLAGS]...")
@click.pass_context
def serve(
    ctx: click.Context, words: tuple[str, ...], output: Path | None, *,
    force: bool, write_only: bool, foreground: bool, no_ray: bool,
) -> None:  # fmt: skip
    translation = translate(words, os.environ, machine())
    name = translation.document["models"][0]["name"]
    path = output or Path(f"{name.replace('/', '-')}.yaml")
    head = f"{name} as `tidegate serve` was told to start it. After a change: tidegate apply {path}"
    write_document(path, translation.document, head, force=force)
    click.echo(f"Wrote {path}.")
    for note in translation.notes:
        click.echo(f"Note: {note}.")
    if not write_only:
        ctx.invoke(up, file=path, foreground=foreground, no_ray=no_ray, timeout_s=None)


def machine() -> MachineResources:
    """What replicas may use on this machine."""
    try:
        flags = _CPUINFO.read_text()
    except OSError:  # not Linux
        flags = ""
    return MachineResources(
        gpus=len(cards_of_machine(Cluster(), os.environ)),
        cpus=len(os.sched_getaffinity(0)),
        bfloat16=_BFLOAT16.search(flags) is not None,
    )
