"""``scale`` and ``mode``: manual overrides."""

from __future__ import annotations

import sys
import time

import click

from policy.errors import TargetError
from serve.controller.client import ControllerClient
from serve.controller_api_schema import ModelStatus
from store.state_dir import StateDir
from tidegate.commands.deployment_context import controller_client
from tidegate.commands.options import as_json
from tidegate.commands.terminal import print_json, warn
from tidegate.commands.units import clock, duration
from tidegate.exit_codes import ExitCode

AUTO = "auto"
_POLL_S = 0.25

_wait = click.option("--wait", is_flag=True, help="Return once the change is complete or rolled back.")
_duration = click.option(
    "--for",
    "for_s",
    metavar="DURATION",
    type=duration,
    help="End the override after e.g. 90s, 30m or 2h; default: until `auto`.",
)


def _count(text: str) -> int | str:
    """A replica count, or ``auto``."""
    if text == AUTO:
        return text
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is neither a replica count nor {AUTO!r}")
    return int(text)


@click.command(
    help="Override the replica count of MODEL in its current mode, within the mode's bounds."
    "\n\nThe scaling policy takes over again with `auto`, or after --for DURATION."
)
@click.argument("model")
@click.argument("replicas", metavar="N|auto", type=_count)
@_duration
@_wait
@as_json
@click.pass_obj
def scale(
    state: StateDir, *, model: str, replicas: int | str, for_s: float | None, wait: bool, as_json: bool
) -> None:
    client = _client(state, replicas, for_s)
    status = client.scale(model, replicas if isinstance(replicas, int) else None, for_s)
    _report(client, status, wait, as_json, _describe_override("scale", status, replicas, for_s))


@click.command(
    help="Switch MODEL to another mode. Streams on the old replicas go on for up to"
    " control.mode.drain_timeout_s; longer ones end with an error event."
    " Refused if queued requests would time out."
    "\n\nThe scaling policy takes over again with `auto`, or after --for DURATION."
)
@click.argument("model")
@click.argument("name", metavar="MODE|auto")
@_duration
@_wait
@as_json
@click.pass_obj
def mode(state: StateDir, *, model: str, name: str, for_s: float | None, wait: bool, as_json: bool) -> None:
    client = _client(state, name, for_s)
    status = client.mode(model, None if name == AUTO else name, for_s)
    _report(client, status, wait, as_json, _describe_override("mode", status, name, for_s))


def _client(state: StateDir, wanted: int | str, for_s: float | None) -> ControllerClient:
    if wanted == AUTO and for_s is not None:
        raise click.UsageError("--for is the duration of an override: leave it out with 'auto'")
    return controller_client(state)


def _describe_override(command: str, status: ModelStatus, wanted: int | str, for_s: float | None) -> str:
    """Until when the override lasts, and the command that ends it."""
    name = status.name
    if wanted != AUTO:
        until = "" if for_s is None else f" until {clock(time.time() + for_s, time.time())}"
        return f"Manual override{until}; end it with `tidegate {command} {name} {AUTO}`."
    if status.override is not None:
        other = "mode" if command == "scale" else "scale"
        return f"Another manual override remains; end it with `tidegate {other} {name} {AUTO}`."
    return f"The scaling policy decides on {name}."


def _settled(client: ControllerClient, wanted: ModelStatus) -> ModelStatus:
    """The model's status once it is steady, or its goal has changed; a start's timeout bounds the wait."""
    while True:
        now = next((model for model in client.status().models if model.name == wanted.name), None)
        if now is None:
            raise TargetError(f"{wanted.name} was removed from the deployment")
        if now.phase in ("steady", "idle") or not _same_goal(now, wanted):
            return now
        time.sleep(_POLL_S)


def _same_goal(one: ModelStatus, other: ModelStatus) -> bool:
    return (one.mode, one.target) == (other.mode, other.target)


def _report(client: ControllerClient, wanted: ModelStatus, wait: bool, as_json: bool, override: str) -> None:
    status = _settled(client, wanted) if wait else wanted
    reached = _same_goal(status, wanted)
    if as_json:
        print_json(status)
    else:
        note = f" ({status.note})" if status.note else ""
        click.echo(
            f"{status.name}: {status.mode}, {status.ready} of {status.target} ready, {status.phase}{note}"
        )
        if reached:
            click.echo(override)
    if not reached:
        warn(f"tidegate: {status.name} did not reach {wanted.mode} x {wanted.target}")
        sys.exit(ExitCode.FAILED)
