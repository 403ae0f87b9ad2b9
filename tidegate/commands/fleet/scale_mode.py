"""``scale`` and ``mode``."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from policy.config.deployment import MODES
from policy.document.parse import parse
from policy.errors import TargetError, Unreachable
from serve.controller.client import ControllerClient
from serve.controller_api import ModelStatus
from store.state_dir import StateDir
from tidegate.commands.durations import clock, duration
from tidegate.exit_codes import Exit

AUTO = "auto"
_POLL_S = 0.25

_wait = click.option("--wait", is_flag=True, help="Return when the model is there, or has been rolled back.")
_term = click.option(
    "--for",
    "for_s",
    metavar="TERM",
    type=duration,
    help="For so long, such as 90s, 30m or 2h; else until `auto`.",
)
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _count(text: str) -> int | str:
    """A number of replicas, or ``auto``."""
    if text == AUTO:
        return text
    if not text.isdecimal():
        raise click.BadParameter(f"{text!r} is neither a number of replicas nor {AUTO!r}")
    return int(text)


@click.command(
    help="Set how many replicas MODEL has in its current mode to N, within the mode's bounds."
    "\n\nLoad does not change it meanwhile; `auto` lets load decide again."
)
@click.argument("model")
@click.argument("replicas", metavar="N|auto", type=_count)
@_term
@_wait
@_as_json
@click.pass_obj
def scale(
    state: StateDir,
    *,
    model: str,
    replicas: int | str,
    for_s: float | None,
    wait: bool,
    as_json: bool,
) -> None:
    _no_term_of_auto(replicas, for_s)
    client = controller_client(state)
    status = client.scale(model, replicas if isinstance(replicas, int) else None, for_s)
    now = _settled(client, status) if wait else status
    _report(now, status, as_json, _by_hand("scale", status, replicas, for_s))


@click.command(
    help="Switch MODEL to the other mode; no stream is cut. Refused when requests would starve."
    "\n\nLoad does not change it meanwhile; `auto` lets load decide again."
)
@click.argument("model")
@click.argument("name", metavar="MODE|auto", type=click.Choice((*MODES, AUTO)))
@_term
@_wait
@_as_json
@click.pass_obj
def mode(state: StateDir, *, model: str, name: str, for_s: float | None, wait: bool, as_json: bool) -> None:
    _no_term_of_auto(name, for_s)
    client = controller_client(state)
    status = client.mode(model, None if name == AUTO else name, for_s)
    now = _settled(client, status) if wait else status
    _report(now, status, as_json, _by_hand("mode", status, name, for_s))


def _no_term_of_auto(wanted: int | str, for_s: float | None) -> None:
    if wanted == AUTO and for_s is not None:
        raise click.UsageError("--for is how long something set by hand holds: it goes without 'auto'")


def _by_hand(command: str, status: ModelStatus, wanted: int | str, for_s: float | None) -> str:
    """Until when it holds, and how to go back before."""
    other = "mode" if command == "scale" else "scale"
    if wanted != AUTO:
        back = f"`tidegate {command} {status.name} {AUTO}` lets load decide"
        if for_s is None:
            return f"Set by hand: {back} again."
        now = time.time()
        return f"Set by hand until {clock(now + for_s, now)}: {back} sooner."
    if status.override is not None:
        return (
            f"Load decides once `tidegate {other} {status.name} {AUTO}` takes back what is still set by hand."
        )
    return "Load decides."


def controller_client(state: StateDir) -> ControllerClient:
    """A client of the running deployment's controller; raises ``Unreachable`` where there is none."""
    raw = state.load(state.deployment_path, dict[str, object])
    if raw is None:
        raise Unreachable(f"nothing was ever started on {state.root}")
    deployment = parse(raw)
    if not deployment.needs_controller:
        raise TargetError("every model is external: Tidegate deploys no replicas here")
    return ControllerClient(deployment.cluster.controller, state.secret())


def _settled(client: ControllerClient, wanted: ModelStatus) -> ModelStatus:
    """The model's status once nothing moves any more; whatever ends a start bounds the wait."""
    while True:
        now = next((model for model in client.status().models if model.name == wanted.name), None)
        if now is None:
            raise TargetError(f"{wanted.name} was removed meanwhile")
        if now.phase in ("steady", "idle") or _aim(now) != _aim(wanted):
            return now
        time.sleep(_POLL_S)


def _aim(status: ModelStatus) -> tuple[str, int]:
    return status.mode, status.target


def _report(status: ModelStatus, wanted: ModelStatus, as_json: bool, by_hand: str) -> None:
    if as_json:
        click.echo(msgspec.json.encode(status).decode())
    else:
        note = f" ({status.note})" if status.note else ""
        click.echo(
            f"{status.name}: {status.mode}, {status.ready} of {status.target} ready, {status.phase}{note}"
        )
    reached = _aim(status) == _aim(wanted)
    if reached and not as_json:
        click.echo(by_hand)
    if not reached:
        click.echo(f"tidegate: {status.name} did not reach {wanted.mode} x {wanted.target}", err=True)
        sys.exit(Exit.FAILED)
