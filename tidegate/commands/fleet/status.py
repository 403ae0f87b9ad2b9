"""``status``: processes, models, scaling and replicas as tables."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import click
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from policy.engine.capacity import Capability
from policy.types import Replica
from serve.controller_api import ModelStatus
from store.state_dir import StateDir
from tidegate.commands.fleet.status_data import StatusData, gather
from tidegate.commands.options import as_json
from tidegate.commands.terminal import console, print_json, table, warn
from tidegate.commands.units import age, clock, rate
from tidegate.exit_codes import Exit
from tidegate.supervisor.socket import ProcessStatus

_COLORS = {
    "ready": "green", "steady": "green", "external": "green", "starting": "yellow", "switching": "yellow",
    "draining": "yellow", "draining the old": "yellow", "recovering": "yellow", "stopping": "yellow",
    "stopped": "red", "unknown": "red",
}  # fmt: skip
# The fleet is published at least once a second.
_STALE_S = 5.0


@click.command(help="Show processes, models and replicas, also while the controller is down.")
@as_json
@click.pass_obj
def status(state: StateDir, as_json: bool) -> None:
    view = gather(state, time.time())
    if as_json:
        print_json(view)
    elif view.supervisor is None:
        warn(f"Nothing is running on {state.root}.")
    else:
        console().print(render(view))
    if view.supervisor is None:
        sys.exit(Exit.NOT_RUNNING)


def render(view: StatusData) -> RenderableType:
    """Header, processes, models, their scaling, and replicas."""
    parts: list[RenderableType] = [_header(view), Text()]
    if view.supervisor is not None:
        parts += [_processes(view.supervisor.processes), Text()]
    parts += [_models(view.models), Text()]
    if scaled := [model for model in view.models if model.decided_by]:
        parts += [_scaling(scaled, view.at), Text()]
    if view.fleet_age_s > _STALE_S:
        parts.append(Text(f"replicas: last updated {age(view.fleet_age_s)} ago", style="yellow"))
    parts.append(_replicas(view))
    return Group(*parts)


def describe_switch_block(mode: str, until: float, at: float) -> str:
    """A mode that failed, and when a switch to it is tried again."""
    return f"{mode} failed; no switch to it before {clock(until, at)}"


def _header(view: StatusData) -> Table:
    header = Table(box=None, show_header=False, pad_edge=False)
    header.add_column(style="dim")
    header.add_column()
    header.add_row("state", view.state_dir)
    if view.supervisor is not None:
        header.add_row("phase", _colored(view.supervisor.phase))
        header.add_row("uptime", age(view.at - view.supervisor.since))
        header.add_row("endpoint", f"{view.supervisor.endpoint}/v1")
        header.add_row("admin", view.supervisor.admin)
    header.add_row("controller", view.controller)
    return header


def _processes(processes: tuple[ProcessStatus, ...]) -> Table:
    rows = table("process", ">pid", ">restarts", ">uptime")
    for process in processes:
        rows.add_row(
            process.name,
            str(process.pid) if process.pid else Text("down", style="red"),
            str(process.restarts),
            age(process.up_s) if process.pid else "",
        )
    return rows


def _models(models: tuple[ModelStatus, ...]) -> Table:
    rows = table("model", "engine", "mode", ">revision", ">desired/ready", "phase", "note")
    for model in models:
        rows.add_row(
            Text(model.name, style="bold"),
            model.engine,
            model.mode or "-",
            str(model.generation),
            f"{'-' if model.phase == 'external' else model.target}/{model.ready}",
            _colored(model.phase),
            Text(model.note, style="dim"),
        )
    return rows


def _scaling(models: Sequence[ModelStatus], at: float) -> Table:
    """What scales each model, and the last decision; ``tidegate explain`` has the details."""
    rows = table("model", "scaled by", ">forecast", "capacity per replica", ">last decision", "reason")
    for model in models:
        rows.add_row(
            Text(model.name, style="bold"),
            _scaled_by(model, at),
            "-" if model.forecast is None else rate(model.forecast),
            _capacity(model.capability),
            "-" if model.decided_at is None else f"{age(at - model.decided_at)} ago",
            _reason(model, at),
        )
    return rows


def _reason(model: ModelStatus, at: float) -> Text:
    reason = Text(model.reason, style="dim")
    for mode, until in model.barred.items():
        reason.append(f"; {describe_switch_block(mode, until, at)}", style="yellow")
    return reason


def _scaled_by(model: ModelStatus, at: float) -> Text:
    if (override := model.override) is not None:
        until = "" if override.until is None else f" until {clock(override.until, at)}"
        return Text(f"manual override{until}", style="yellow")
    return Text(f"{model.decided_by}, dry run" if model.dry_run else model.decided_by)


def _capacity(capability: Capability | None) -> str:
    """The rate of one replica within the SLO, or its maximum rate if it cannot meet the SLO at any rate."""
    if capability is None:
        return "-"
    calibrated = f" (model v{capability.version})" if capability.version else ""
    if capability.mu:
        return f"{rate(capability.mu)}{calibrated}"
    return f"max {rate(capability.mu_max)}, SLO missed{calibrated}"


def _replicas(view: StatusData) -> Table:
    rows = table(
        *("replica", "shape", ">revision", "state", ">load", ">running/waiting", ">KV cache", ">updated"),
        *("node", "url", ">pid"),
    )
    for replica in sorted(view.fleet.replicas, key=lambda replica: replica.id):
        rows.add_row(*_row(replica, view.at))
    return rows


def _row(replica: Replica, at: float) -> tuple[RenderableType, ...]:
    load = replica.load
    state = _colored(str(replica.state))
    if replica.failures:
        state.append(f", failed {replica.failures} times", style="red")
    return (
        replica.id,
        replica.shape or "-",
        str(replica.generation),
        state,
        f"{load.in_flight}/{load.bound}" if load.bound else str(load.in_flight),
        f"{load.running}/{load.waiting}",
        f"{load.kv_used:.0%}",
        f"{age(at - load.at)} ago" if load.at else "-",
        replica.node or "-",
        replica.url.removeprefix("http://") or "-",
        str(replica.pid or "-"),
    )


def _colored(word: str) -> Text:
    return Text(word, style=_COLORS.get(word, ""))
