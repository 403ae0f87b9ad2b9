"""When a file is saved.

``check`` and ``apply``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from policy.config.deployment import ModelSpec
from policy.document.diff import Change, Effect, diff
from policy.document.parse import parse
from policy.errors import ConfigError, TidegateError
from policy.scaling.policies.registry import choose
from serve.autoscaler.policies import policies_for, policies_of
from store.state_dir import StateDir
from tidegate import document as documents
from tidegate.commands.terminal import console
from tidegate.exit_codes import Exit
from tidegate.redaction import redact
from tidegate.supervisor.socket import SupervisorClient

# Two looks that agree make a save: an editor writes in pieces, or puts another file in its place.
POLL_S = 0.2


def file_changes(path: Path, sleep: Callable[[float], None] = time.sleep) -> Iterator[None]:
    """Yield once for the file as it is, and again whenever it was saved and came to rest.

    It is looked at rather than subscribed to, which works on every file system and through a renamed file.
    """
    told = seen = None
    while True:
        now = _signature(path)
        if now is not None and now == seen and now != told:
            told = now
            yield
        seen = now
        sleep(POLL_S)


def _signature(path: Path) -> tuple[int, int, int] | None:
    """What another content has another of; ``None`` while there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


_EFFECTS = {
    Effect.LIVE: "at once",
    Effect.NEW_GENERATION: "new generation: made ready before the old drains",
    Effect.RESTART: "needs down and up",
}

_file = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))

_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command(help="Validate FILE; a refusal names the path, the value and what was expected.")
@_file
@_as_json
@click.pass_obj
def check(_state: StateDir, file: Path, as_json: bool) -> None:
    try:
        deployment = documents.load(file).deployment
        deciders = {spec.name: _decider(spec) for spec in deployment.models}
    except ConfigError as error:
        if not as_json:
            raise
        _print({"ok": False, "path": error.path, "value": error.value, "expected": error.expected})
        sys.exit(Exit.INVALID)
    models = [
        {"name": spec.name, "engine": spec.engine, "mode": spec.first_mode, "decides": deciders[spec.name]}
        for spec in deployment.models
    ]
    if as_json:
        _print({"ok": True, "models": models})
        return
    for model in models:
        first = f", {model['mode']} first" if model["mode"] else ""
        click.echo(f"{model['name']}: engine {model['engine']}{first}; {model['decides']}")
    click.echo(f"{file} is valid.")


def _decider(spec: ModelSpec) -> str:
    """What would decide, within which bounds; raises :class:`ConfigError` where it cannot be made."""
    if not spec.modes:
        return "nothing to decide"
    ranges = {name: (mode.bounds.min, mode.bounds.max) for name, mode in spec.modes.items()}
    bounds = " or ".join(
        f"{name} x {least}" if least == most else f"{name} x {least} to {most}"
        for name, (least, most) in ranges.items()
    )
    chosen = policies_of(spec)
    policies_for(spec.name, chosen, lambda event: click.echo(event, err=True))
    control = spec.control
    verb = "decides"
    if control.guard.dry_run:
        asleep = any(not mode.bounds.min for mode in spec.modes.values())
        verb = f"would decide (guard.dry_run{': at zero it is not woken either' if asleep else ''})"
    shadow = f", {choose('', chosen.shadow).label} beside it" if chosen.shadow is not None else ""
    promised = [
        f"{name} p95 {limit:g} s"
        for name, limit in (("TTFT", control.slo.ttft_p95_s), ("ITL", control.slo.itl_p95_s))
        if limit is not None
    ]
    promise = f" for {', '.join(promised)}" if promised else ""
    return f"{choose('', chosen.live).label} {verb}{shadow}: {bounds}{promise}"


@click.command(
    help="Show what FILE would change in the running deployment, and apply it whole or not at all."
)
@_file
@click.option("--dry-run", is_flag=True, help="Only show the changes.")
@click.option("--watch", is_flag=True, help="Do it again whenever FILE is saved, until Ctrl-C.")
@_as_json
@click.pass_obj
def apply(state: StateDir, file: Path, dry_run: bool, watch: bool, as_json: bool) -> None:
    client = SupervisorClient(state)
    if watch:
        client.status()  # nothing is watched for nobody
        _watch(client, file, dry_run, as_json)
    elif not _applied(client, file, dry_run, as_json):
        sys.exit(Exit.REFUSED)


def _watch(client: SupervisorClient, file: Path, dry_run: bool, as_json: bool) -> None:
    """Apply each save; what is refused is said, and what ran keeps running."""
    with contextlib.suppress(KeyboardInterrupt):
        for _ in file_changes(file):
            if not as_json:
                click.echo(f"{time.strftime('%H:%M:%S')} {file}")
            try:
                applied = _applied(client, file, dry_run, as_json)
            except TidegateError as error:
                applied = False
                click.echo(f"tidegate: {error}", err=True)
            if not applied:
                click.echo("What ran keeps running.", err=True)


def _applied(client: SupervisorClient, file: Path, dry_run: bool, as_json: bool) -> bool:
    """Show what changes, and apply it; returns whether nothing of it was refused."""
    document = documents.load(file)
    changes = diff(parse(client.status().document), document.deployment)
    refused = [change for change in changes if change.effect is Effect.RESTART]
    # Also without a change: what failed is tried again, and weights in a directory are looked at again.
    applied = not refused and not dry_run
    if not as_json:
        _table(changes)
    if applied:
        client.apply(document.raw)
    if as_json:
        shown = [{**msgspec.to_builtins(change), **_masked(change)} for change in changes]
        _print({"applied": applied, "changes": shown})
    elif applied and changes:
        click.echo("Applied.")
    for change in refused:
        before, after = _masked(change).values()
        click.echo(
            f"tidegate: {change.path}: got {after!r}, expected {before!r} (or down and up: {change.why})",
            err=True,
        )
    return not refused


def _table(changes: tuple[Change, ...]) -> None:
    if not changes:
        click.echo("Nothing changes.")
        return
    table = Table("path", "before", "after", "takes effect", box=None, header_style="bold")
    for change in changes:
        before, after = _masked(change).values()
        table.add_row(change.path, _text(before), _text(after), _EFFECTS[change.effect])
    console().print(table)


def _masked(change: Change) -> dict[str, Any]:
    """Before and after, as they may be shown."""
    return {"before": redact(change.before, change.path), "after": redact(change.after, change.path)}


def _text(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _print(value: object) -> None:
    click.echo(msgspec.json.encode(value).decode())
