"""The tables of ``tidegate status``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from policy.engine.capacity import Capability
from policy.types import Replica
from serve.controller_api import ModelStatus
from tidegate.commands.durations import clock
from tidegate.commands.fleet.status_data import StatusData
from tidegate.supervisor.socket import ProcessStatus

_COLORS = {
    "ready": "green", "steady": "green", "external": "green", "starting": "yellow", "switching": "yellow",
    "draining": "yellow", "draining the old": "yellow", "recovering": "yellow", "stopping": "yellow",
    "stopped": "red", "unknown": "red",
}  # fmt: skip
# A fleet that is sent at least once a second is old after this.
_STALE_S = 5.0


def render(view: StatusData) -> RenderableType:
    """Header, processes, models, who decides on them, and replicas."""
    parts: list[RenderableType] = [_header(view), Text()]
    if view.supervisor is not None:
        parts += [_processes(view.supervisor.processes), Text()]
    parts += [_models(view.models), Text()]
    if decided := [model for model in view.models if model.decided_by]:
        parts += [_decisions(decided, view.at), Text()]
    if view.fleet_age_s > _STALE_S:
        parts.append(Text(f"replicas as last known, {age(view.fleet_age_s)} ago", style="yellow"))
    parts.append(_replicas(view))
    return Group(*parts)


def _header(view: StatusData) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("state", view.state_dir)
    if view.supervisor is not None:
        table.add_row("phase", _colored(view.supervisor.phase))
        table.add_row("up", age(view.at - view.supervisor.since))
        table.add_row("endpoint", f"{view.supervisor.endpoint}/v1")
        table.add_row("admin", view.supervisor.admin)
    table.add_row("controller", view.controller)
    return table


def _processes(processes: tuple[ProcessStatus, ...]) -> Table:
    table = _table("process", "pid", "restarts", "up", right=("pid", "restarts", "up"))
    for process in processes:
        down = Text("down", style="red")
        table.add_row(
            process.name,
            str(process.pid) if process.pid else down,
            str(process.restarts),
            age(process.up_s) if process.pid else "",
        )
    return table


def _models(models: tuple[ModelStatus, ...]) -> Table:
    table = _table(
        "model", "engine", "mode", "generation", "ready", "phase", "note", right=("generation", "ready")
    )
    for model in models:
        table.add_row(
            Text(model.name, style="bold"),
            model.engine,
            model.mode or "-",
            str(model.generation),
            f"{model.ready}/{model.target}" if model.target else str(model.ready),
            _colored(model.phase),
            Text(model.note, style="dim"),
        )
    return table


def _decisions(models: Sequence[ModelStatus], at: float) -> Table:
    """Who decides, by what, and what came of it last; ``tidegate explain`` has the rest."""
    table = _table("model", "decided by", "expects", "one takes", "last", "reason", right=("expects", "last"))
    for model in models:
        table.add_row(
            Text(model.name, style="bold"),
            _decided_by(model, at),
            "-" if model.forecast is None else rate(model.forecast),
            _capability(model.capability),
            "-" if model.decided_at is None else f"{age(at - model.decided_at)} ago",
            _reason(model, at),
        )
    return table


def _reason(model: ModelStatus, at: float) -> Text:
    said = Text(model.reason, style="dim")
    for mode, until in model.barred.items():
        said.append(f"; {describe_switch_block(mode, until, at)}", style="yellow")
    return said


def describe_switch_block(mode: str, until: float, at: float) -> str:
    """A mode that load does not switch to for a while, in words."""
    return f"{mode} failed and is not tried before {clock(until, at)}"


def _decided_by(model: ModelStatus, at: float) -> Text:
    if (override := model.override) is not None:
        until = "" if override.until is None else f" until {clock(override.until, at)}"
        return Text(f"by hand{until}", style="yellow")
    return Text(f"{model.decided_by}, dry run" if model.dry_run else model.decided_by)


def _capability(capability: Capability | None) -> str:
    """What one replica was taken to do within the objective; what it can do at all if that is nothing."""
    if capability is None:
        return "-"
    fitted = f", v{capability.version}" if capability.version else ""
    if capability.mu:
        return f"{rate(capability.mu)}{fitted}"
    return f"{rate(capability.mu_max)} at most{fitted}"


def _replicas(view: StatusData) -> Table:
    table = _table(
        *("replica", "shape", "gen", "state", "load", "run/wait", "kv", "age", "node", "url", "pid"),
        right=("gen", "load", "run/wait", "kv", "age", "pid"),
    )
    for replica in sorted(view.fleet.replicas, key=lambda replica: replica.id):
        table.add_row(*_row(replica, view.at))
    return table


def _row(replica: Replica, at: float) -> tuple[RenderableType, ...]:
    load = replica.load
    return (
        replica.id,
        replica.shape or "-",
        str(replica.generation),
        _state(replica),
        f"{load.in_flight}/{load.bound}" if load.bound else str(load.in_flight),
        f"{load.running}/{load.waiting}",
        f"{load.kv_used:.0%}",
        age(at - load.at) if load.at else "-",
        replica.node or "-",
        replica.url.removeprefix("http://") or "-",
        str(replica.pid or "-"),
    )


def _state(replica: Replica) -> Text:
    """Its state; of one that keeps failing also how often."""
    state = _colored(str(replica.state))
    if replica.failures:
        state.append(f", failed {replica.failures} times", style="red")
    return state


def _table(*columns: str, right: tuple[str, ...]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _colored(word: str) -> Text:
    return Text(word, style=_COLORS.get(word, ""))


def rate(per_s: float) -> str:
    """Requests per second, to three digits."""
    return f"{per_s:.2f}/s" if per_s < 10 else f"{per_s:.1f}/s"


def age(seconds: float) -> str:
    """A duration in its two largest units."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
