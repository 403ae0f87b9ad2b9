"""``adapters``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import msgspec

from policy.errors import AdapterUnknown, ConfigError
from policy.wire.catalog import NAME, Alias
from policy.wire.controller import AddRequest
from serve.adapters.status import AdaptersStatus, AdapterStatus
from store.state_dir import StateDir
from tidegate.commands.fleet.adapter_output import AddProgress, history, overview
from tidegate.commands.fleet.scale_mode import controller_client
from tidegate.commands.terminal import console

# What is no path: a URL of any kind, or a repository of the Hugging Face hub.
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|hf:")
_SHARE = re.compile(r"v([1-9][0-9]{0,8})=([0-9]+(?:\.[0-9]+)?)")

_name = click.argument("name")
_model = click.option("--model", help="The base model, where several take adapters.")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group(
    invoke_without_command=True, help="Show the LoRA adapters; with a command, change which there are."
)
@_as_json
@click.pass_context
def adapters(ctx: click.Context, as_json: bool) -> None:
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.BadOptionUsage("--json", f"--json: expected after {ctx.invoked_subcommand}")
        return
    status = controller_client(ctx.obj).adapters()
    if as_json:
        _print(status)
    elif status.adapters:
        console().print(overview(status))
    else:
        click.echo("There are no adapters. Add one: tidegate adapters add NAME SOURCE")


@adapters.command(help="Show the versions of NAME, where each is and where it came from.")
@_name
@_model
@_as_json
@click.pass_obj
def show(state: StateDir, name: str, model: str | None, as_json: bool) -> None:
    status = controller_client(state).adapters()
    found = _found(status, name, model)
    if as_json:
        _print(found)
    else:
        console().print(history(found, status.at))


@adapters.command(
    help="Add the adapter in SOURCE as NAME, or replace what NAME stands for.\n\nSOURCE is a directory, an"
    " archive (a path or https://), hf:ORG/NAME[@REVISION] or a URL of an object store, such as s3://."
)
@_name
@click.argument("source")
@_model
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    help="Who may use it, repeatable; by default who could before, of a new one everybody.",
)
@click.option("--everybody", is_flag=True, help="Everybody may use it, whoever could before.")
@_as_json
@click.pass_obj
def add(  # noqa: PLR0917 - click passes them by name
    state: StateDir,
    name: str,
    source: str,
    model: str | None,
    tenants: tuple[str, ...],
    everybody: bool,
    as_json: bool,
) -> None:
    if NAME.fullmatch(name) is None:
        raise click.BadParameter(
            f"got {name!r}, expected a name that matches {NAME.pattern}", param_hint="NAME"
        )
    if everybody and tenants:
        raise click.BadOptionUsage("--everybody", "--everybody: expected without --tenant")
    client = controller_client(state)
    of = _model_of(client.adapters(), name, model)
    allowed = () if everybody else tenants or None
    wanted = AddRequest(name=name, source=_absolute(source), model=of, tenants=allowed)
    with AddProgress(name, quiet=as_json) as progress:
        try:
            alias = client.add_adapter(wanted, progress)
        except ConfigError as error:
            # A value of the command line, not of a document.
            hint = "--tenant" if error.path == "tenants" else error.path
            raise click.BadParameter(
                f"got {error.value!r}, expected {error.expected}", param_hint=hint
            ) from error
    if as_json:
        _print(alias)
    else:
        click.echo(f"{_said(alias)}.")


@adapters.command(help="Take NAME away: requests for it are 404 from now on, those in flight finish.")
@_name
@_model
@_as_json
@click.pass_obj
def remove(state: StateDir, name: str, model: str | None, as_json: bool) -> None:
    client = controller_client(state)
    found = _found(client.adapters(), name, model)
    client.remove_adapter(found.model, name)
    if as_json:
        _print({"model": found.model, "name": name})
    else:
        click.echo(f"{name} is removed from {found.model}.")


@adapters.command(
    help="Let NAME stand for several versions by weight, such as v1=95 v2=5; a client stays with its own."
)
@_name
@click.argument("shares", nargs=-1, required=True, metavar="VERSION=WEIGHT...")
@_model
@_as_json
@click.pass_obj
def split(state: StateDir, name: str, shares: tuple[str, ...], model: str | None, as_json: bool) -> None:
    weights = _weights(shares)
    client = controller_client(state)
    found = _found(client.adapters(), name, model)
    _report(client.split_adapter(found.model, name, weights), as_json)


@adapters.command(help="Let NAME stand for what it stood for before.")
@_name
@_model
@_as_json
@click.pass_obj
def rollback(state: StateDir, name: str, model: str | None, as_json: bool) -> None:
    client = controller_client(state)
    found = _found(client.adapters(), name, model)
    _report(client.rollback_adapter(found.model, name), as_json)


def _absolute(source: str) -> str:
    """``source`` as the controller understands it, whose folder is another."""
    if _REMOTE.match(source):
        return source
    path = Path(source).expanduser().resolve()
    if not source or not path.exists():
        expected = "a path that exists, https://, hf:ORG/NAME or a URL of an object store"
        raise click.BadParameter(
            f"got {source!r}, expected {expected} (looked at {path})", param_hint="SOURCE"
        )
    return str(path)


def _weights(shares: tuple[str, ...]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for share in shares:
        match = _SHARE.fullmatch(share)
        if match is None or f"v{match[1]}" in weights:
            raise click.BadParameter(
                f"got {share!r}, expected VERSION=WEIGHT such as v1=95, each version once",
                param_hint="VERSION=WEIGHT",
            )
        weights[f"v{match[1]}"] = float(match[2])
    if not any(weights.values()):
        raise click.BadParameter(
            f"got {' '.join(shares)!r}, expected a weight above 0", param_hint="VERSION=WEIGHT"
        )
    return weights


def _model_of(status: AdaptersStatus, name: str, model: str | None) -> str | None:
    """On which model ``name`` is added: the one that has it already, or the only one that takes any."""
    _check_model(status, model)
    if model is not None or len(status.models) <= 1:
        return model
    having = [adapter.model for adapter in status.adapters if adapter.name == name]
    if len(having) != 1:
        raise _which(having or list(status.models))
    return having[0]


def _found(status: AdaptersStatus, name: str, model: str | None) -> AdapterStatus:
    """The adapter called ``name``; raises :class:`policy.errors.AdapterUnknown` if there is none."""
    _check_model(status, model)
    found = [each for each in status.adapters if each.name == name and model in (None, each.model)]
    if not found:
        known = (
            ", ".join(sorted({each.name for each in status.adapters})[:20]) or "none: there are no adapters"
        )
        raise AdapterUnknown(f"NAME: got {name!r}, expected one of {known}")
    if len(found) > 1:
        raise _which([each.model for each in found])
    return found[0]


def _check_model(status: AdaptersStatus, model: str | None) -> None:
    if model is not None and model not in status.models:
        expected = ", ".join(status.models) or "nothing: no model takes adapters"
        raise click.BadParameter(f"got {model!r}, expected {expected}", param_hint="--model")


def _which(models: list[str]) -> click.UsageError:
    return click.BadParameter(f"got none, expected one of {', '.join(models)}", param_hint="--model")


def _said(alias: Alias) -> str:
    """What a name stands for, as a sentence."""
    total = sum(weight for _, weight in alias.split)
    parts = []
    for number, weight in alias.split:
        version = alias.version(number)
        if version is not None and weight:
            share = "" if weight == total else f" {weight / total:.4g} of"
            parts.append(f"{share} v{number} ({version.digest[:12]})".strip())
    return f"{alias.name} on {alias.model} stands for {', '.join(parts)}"


def _report(alias: Alias, as_json: bool) -> None:
    if as_json:
        _print(alias)
    else:
        click.echo(f"{_said(alias)}.")


def _print(value: Any) -> None:
    click.echo(msgspec.json.encode(value).decode())
