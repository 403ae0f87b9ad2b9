"""``scale`` and ``mode``."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from policy.config import MODES
from policy.errors import TargetError, Unreachable
from policy.parsing import parse
from serve.client import ControllerClient, ModelStatus
from store.state import StateDir
from tidegate.exits import Exit

_POLL_S = 0.25

_wait = click.option("--wait", is_flag=True, help="Return when the model is there, or has been rolled back.")
_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.command(help="Set how many replicas MODEL has in its current mode to N, within the mode's bounds.")
@click.argument("model")
@click.argument("replicas", metavar="N", type=click.IntRange(min=0))
@_wait
@_as_json
@click.pass_obj
def scale(state: StateDir, model: str, replicas: int, wait: bool, as_json: bool) -> None:
    client = controller(state)
    status = client.scale(model, replicas)
    _report(_settled(client, status) if wait else status, status, as_json)


@click.command(help="Switch MODEL to the other mode; no stream is cut. Refused when requests would starve.")
@click.argument("model")
@click.argument("name", metavar="MODE", type=click.Choice(MODES))
@_wait
@_as_json
@click.pass_obj
def mode(state: StateDir, model: str, name: str, wait: bool, as_json: bool) -> None:
    client = controller(state)
    status = client.mode(model, name)
    _report(_settled(client, status) if wait else status, status, as_json)


def controller(state: StateDir) -> ControllerClient:
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


def _report(status: ModelStatus, wanted: ModelStatus, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(status).decode())
    else:
        note = f" ({status.note})" if status.note else ""
        click.echo(
            f"{status.name}: {status.mode}, {status.ready} of {status.target} ready, {status.phase}{note}"
        )
    if _aim(status) != _aim(wanted):
        click.echo(f"tidegate: {status.name} did not reach {wanted.mode} x {wanted.target}", err=True)
        sys.exit(Exit.FAILED)
