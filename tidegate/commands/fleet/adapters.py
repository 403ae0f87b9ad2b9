"""``adapters``: show and change LoRA adapters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from policy.errors import AdapterUnknown, ConfigError
from policy.wire.adapter_catalog import NAME, Alias
from policy.wire.controller import AddAdapterLine, AddAdapterRequest
from serve.adapters.status import AdaptersStatus, AdapterState, AdapterStatus, VersionStatus
from store.state_dir import StateDir
from tidegate.commands.deployment_context import controller_client
from tidegate.commands.options import as_json
from tidegate.commands.terminal import ProgressBar, console, print_change, print_json, table, table_of_rows
from tidegate.commands.units import age, optional, size

# Sources that are not paths: URLs, and repositories of the Hugging Face hub.
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://|hf:")
_VERSION = re.compile(r"v[1-9][0-9]{0,8}")
_SHARE = re.compile(rf"({_VERSION.pattern})=([0-9]+(?:\.[0-9]+)?)")

_name = click.argument("name")
_model = click.option("--model", help="The base model, if several support adapters.")


def _on_adapter(command: Callable[..., None]) -> Callable[..., None]:
    """The parameters of a command on one adapter: its name, ``--model`` and ``--json``."""
    return _name(_model(as_json(click.pass_obj(command))))


@click.group(invoke_without_command=True, help="Show LoRA adapters; with a command, show or change one.")
@as_json
@click.pass_context
def adapters(ctx: click.Context, as_json: bool) -> None:
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.BadOptionUsage("--json", f"--json: expected after {ctx.invoked_subcommand}")
        return
    status = controller_client(ctx.obj).adapters()
    if as_json:
        print_json(status)
    elif status.adapters:
        console().print(overview(status))
    elif not status.models:
        click.echo("No model takes adapters: none has a section `adapters`.")
    else:
        click.echo("There are no adapters. Add one: tidegate adapters add NAME SOURCE")


@adapters.command(help="Show the versions of NAME, the replicas that have them loaded, and their sources.")
@_on_adapter
def show(state: StateDir, name: str, model: str | None, as_json: bool) -> None:
    status = controller_client(state).adapters()
    adapter = _find(status, name, model)
    if as_json:
        print_json(adapter)
    else:
        console().print(history(adapter, status.at))


@adapters.command(
    help="Add the adapter in SOURCE as NAME, or as a new version of NAME.\n\nSOURCE is a directory, an"
    " archive (a path or https://), hf:ORG/NAME[@REVISION] or an object store URL such as s3://."
)
@_name
@click.argument("source")
@_model
@click.option(
    "--tenant",
    "tenants",
    multiple=True,
    help="Tenant with access, repeatable; default: as before, or every tenant for a new adapter.",
)
@click.option("--all-tenants", is_flag=True, help="Give access to every tenant.")
@click.option(
    "--weight",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Percentage of requests for the new version; the present ones keep the rest. 0 adds it without"
    " requests. Default: 100.",
)
@click.option("--force", is_flag=True, help="Accept an adapter that names another base model.")
@as_json
@click.pass_obj
def add(  # noqa: PLR0917 - click passes them by name
    state: StateDir,
    name: str,
    source: str,
    model: str | None,
    tenants: tuple[str, ...],
    all_tenants: bool,
    weight: float | None,
    force: bool,
    as_json: bool,
) -> None:
    if NAME.fullmatch(name) is None:
        raise click.BadParameter(
            f"got {name!r}, expected a name that matches {NAME.pattern}", param_hint="NAME"
        )
    if all_tenants and tenants:
        raise click.BadOptionUsage("--all-tenants", "--all-tenants: expected without --tenant")
    client = controller_client(state)
    request = AddAdapterRequest(
        name=name,
        source=_absolute(source),
        model=_model_of(client.adapters(), name, model),
        tenants=() if all_tenants else tenants or None,
        weight=weight,
        force=force,
    )
    with add_progress(name, quiet=as_json) as progress:
        try:
            alias = client.add_adapter(request, progress)
        except ConfigError as error:
            # The value comes from the command line, not from a deployment file.
            hint = "--tenant" if error.path == "tenants" else error.path
            raise click.BadParameter(
                f"got {error.value!r}, expected {error.expected}", param_hint=hint
            ) from error
    _report(alias, as_json)
    newest = alias.versions[-1]
    if not as_json and newest.number > max(alias.shares):
        click.echo(
            f"v{newest.number} ({newest.digest[:12]}) serves no requests: see `tidegate adapters split`."
        )


@adapters.command(help="Remove NAME: new requests for it get 404, those in flight finish.")
@_on_adapter
def remove(state: StateDir, name: str, model: str | None, as_json: bool) -> None:
    client = controller_client(state)
    base = _find(client.adapters(), name, model).model
    client.remove_adapter(base, name)
    print_change({"model": base, "name": name}, f"{name} is removed from {base}.", as_json=as_json)


@adapters.command(
    help="Split the traffic of NAME over versions by weight, e.g. v1=95 v2=5; a client keeps its version."
)
@_name
@click.argument("shares", nargs=-1, required=True, metavar="VERSION=WEIGHT...")
@_model
@as_json
@click.pass_obj
def split(state: StateDir, name: str, shares: tuple[str, ...], model: str | None, as_json: bool) -> None:
    weights = _weights(shares)
    client = controller_client(state)
    base = _find(client.adapters(), name, model).model
    _report(client.split_adapter(base, name, weights), as_json)


@adapters.command(
    help="Return NAME to its former weights, but never to more of its newest version; or to one version."
)
@_on_adapter
@click.option("--to", metavar="VERSION", help="Serve this version alone, such as v1.")
def rollback(state: StateDir, name: str, model: str | None, to: str | None, as_json: bool) -> None:
    if to is not None and _VERSION.fullmatch(to) is None:
        raise click.BadParameter(f"got {to!r}, expected a version such as v1", param_hint="--to")
    client = controller_client(state)
    base = _find(client.adapters(), name, model).model
    _report(client.rollback_adapter(base, name, to), as_json)


def _absolute(source: str) -> str:
    """``source`` with an absolute path: the controller runs in another folder."""
    if _REMOTE.match(source):
        return source
    path = Path(source).expanduser().resolve()
    if not source or not path.exists():
        expected = "a path that exists, https://, hf:ORG/NAME or an object store URL"
        raise click.BadParameter(
            f"got {source!r}, expected {expected} (looked at {path})", param_hint="SOURCE"
        )
    return str(path)


def _weights(shares: tuple[str, ...]) -> dict[str, float]:
    weights: dict[str, float] = {}
    for share in shares:
        match = _SHARE.fullmatch(share)
        if match is None or match[1] in weights:
            raise click.BadParameter(
                f"got {share!r}, expected VERSION=WEIGHT such as v1=95, each version once",
                param_hint="VERSION=WEIGHT",
            )
        weights[match[1]] = float(match[2])
    if not any(weights.values()):
        raise click.BadParameter(
            f"got {' '.join(shares)!r}, expected a weight above 0", param_hint="VERSION=WEIGHT"
        )
    return weights


def _model_of(status: AdaptersStatus, name: str, model: str | None) -> str | None:
    """The base model to add ``name`` to: the one that has it already, or the only one with adapters."""
    _check_model(status, model)
    if model is not None or len(status.models) <= 1:
        return model
    candidates = [adapter.model for adapter in status.adapters if adapter.name == name]
    if len(candidates) != 1:
        raise _ambiguous(candidates or list(status.models))
    return candidates[0]


def _find(status: AdaptersStatus, name: str, model: str | None) -> AdapterStatus:
    """The adapter called ``name``; raises :class:`policy.errors.AdapterUnknown` if there is none."""
    _check_model(status, model)
    matches = [each for each in status.adapters if each.name == name and model in (None, each.model)]
    if not matches:
        names = sorted({each.name for each in status.adapters})[:20]
        known = ", ".join(names) or "none: there are no adapters"
        raise AdapterUnknown(f"NAME: got {name!r}, expected one of {known}")
    if len(matches) > 1:
        raise _ambiguous([each.model for each in matches])
    return matches[0]


def _check_model(status: AdaptersStatus, model: str | None) -> None:
    if model is not None and model not in status.models:
        expected = ", ".join(status.models) or "nothing: no model supports adapters"
        raise click.BadParameter(f"got {model!r}, expected {expected}", param_hint="--model")


def _ambiguous(models: list[str]) -> click.UsageError:
    return click.BadParameter(f"got none, expected one of {', '.join(models)}", param_hint="--model")


def _report(alias: Alias, as_json: bool) -> None:
    if as_json:
        print_json(alias)
        return
    total = sum(weight for _, weight in alias.split)
    versions = []
    for number, weight in alias.split:
        version = alias.version(number)
        if version is not None and weight:
            share = "" if weight == total else f"{weight / total:.4g} of "
            versions.append(f"{share}v{number} ({version.digest[:12]})")
    click.echo(f"{alias.name} on {alias.model} serves {', '.join(versions)}.")


_COLORS = {
    AdapterState.READY: "green",
    AdapterState.PARTIAL: "yellow",
    AdapterState.FETCHING: "yellow",
    AdapterState.FAILED: "red",
}

# Replicas that a cell names; the others are counted.
_NAMED_REPLICAS = 2


def overview(status: AdaptersStatus) -> Table:
    """One row for each version that a name serves; with several base models they have a column."""
    several = len(status.models) > 1
    rows = [
        (adapter.model, *row) if several else row
        for adapter in status.adapters
        for row in [_row(adapter, version, status.at) for version in adapter.versions if version.share]
        or [_row_without_version(adapter)]
    ]
    return table_of_rows(
        [
            *(["model"] if several else []),
            *("name", "version", ">rank", ">size", "loaded on", ">requests/s", ">hit rate", "last used"),
            "state",
        ],
        rows,
    )


def history(adapter: AdapterStatus, at: float) -> RenderableType:
    """The stored versions of one name, newest first, with their placement and the refusals of replicas."""
    head = table(
        [adapter],
        ("model", lambda adapter: adapter.model),
        ("tenants", lambda adapter: ", ".join(adapter.tenants) or "all"),
        ("state", _state),
        ("note", lambda adapter: Text(adapter.note, style="dim")),
    )
    newest_first = adapter.versions[::-1]
    versions = table(
        newest_first,
        ("version", lambda version: f"v{version.number}"),
        (">share", lambda version: f"{version.share:.4g}" if version.share else None),
        ("digest", lambda version: version.digest[:12]),
        (">rank", lambda version: version.rank),
        (">size", lambda version: size(version.size)),
        ("added", lambda version: f"{age(at - version.at)} ago"),
        ("loaded on", _loaded_on),
        ("source", lambda version: version.source),
    )
    placements = [
        Text(f"placement of v{version.number}: {version.why}", style="dim")
        for version in newest_first
        if version.why
    ]
    refusals = [
        Text(f"v{version.number} is refused by {refusal.replica}: {refusal.reason}", style="yellow")
        for version in adapter.versions
        for refusal in version.refused
    ]
    return Group(head, Text(), versions, *placements, *refusals)


@contextmanager
def add_progress(name: str, *, quiet: bool) -> Iterator[Callable[[AddAdapterLine], None]]:
    """Shows each :class:`policy.wire.controller.AddAdapterLine` that the yielded function is called with."""
    if quiet:
        yield lambda line: None
        return
    with ProgressBar("", size) as bar:
        yield lambda line: bar.update(
            line.done, line.total, task=name, step=line.step, text=f"{line.step:<12}{line.message}"
        )


def _row(adapter: AdapterStatus, version: VersionStatus, at: float) -> tuple[object, ...]:
    share = "" if version.share == 1 else f" {version.share:.4g}"
    return (
        Text(adapter.name, style="bold"),
        f"v{version.number}@{version.digest[:12]}{share}",
        version.rank,
        size(version.size),
        _loaded_on(version),
        f"{version.requests_per_s:.2f}" if version.requests_per_s >= 0.005 else None,
        optional(version.hit_rate, "{:.0%}".format),
        optional(version.last_used, lambda then: f"{age(at - then)} ago"),
        _state(adapter),
    )


def _row_without_version(adapter: AdapterStatus) -> tuple[object, ...]:
    return (Text(adapter.name, style="bold"), *[None] * 3, adapter.note, *[None] * 3, _state(adapter))


def _loaded_on(version: VersionStatus) -> str | None:
    named = ", ".join(version.loaded[:_NAMED_REPLICAS])
    more = len(version.loaded) - _NAMED_REPLICAS
    return f"{named} and {more} more" if more > 0 else named or None


def _state(adapter: AdapterStatus) -> Text:
    return Text(str(adapter.state), style=_COLORS[adapter.state])
