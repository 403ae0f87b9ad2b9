"""``status``: processes, models, scaling and replicas, from the supervisor, the controller and gateways."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import click
import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gateway.accounting.cli_client import AccountingClient
from policy.config.deployment import Deployment
from policy.config.port_conflicts import is_loopback, may_be_open
from policy.deployment_file.parse import parse
from policy.engine.replica_capacity import Capability
from policy.errors import Unreachable
from policy.types import EMPTY_FLEET, EngineKind, FleetSnapshot, Model, Replica, ReplicaLoad, ReplicaPhase
from policy.wire.controller import LeaderStatus
from policy.wire.usage_query import LedgerStatus
from serve.controller.client import ControllerClient
from serve.controller_api_schema import ModelStatus
from store.state_dir import StateDir
from tidegate.commands.options import as_json
from tidegate.commands.terminal import console, print_json, table, warn
from tidegate.commands.units import age, clock, optional, rate
from tidegate.exit_codes import ExitCode
from tidegate.redaction import redact
from tidegate.supervisor.control_socket import ProcessStatus, SupervisorClient, SupervisorStatus
from tidegate.supervisor.external_server_status import external_models, gateway_fleet, summary
from tidegate.supervisor.preflight import has_tenants


class StatusData(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment's status, without secrets; ``fleet_age_s`` is the age of the replicas' part.

    ``controllers`` are those that elect their leader, by address; ``None`` for one that does not answer.
    """

    state_dir: str
    at: float
    supervisor: SupervisorStatus | None
    models: tuple[ModelStatus, ...] = ()
    fleet: FleetSnapshot = EMPTY_FLEET
    fleet_age_s: float = 0.0
    controller: str = ""
    controllers: dict[str, LeaderStatus | None] = {}
    access: str = ""
    ledger: LedgerStatus | None = None
    events: tuple[str, ...] = ()


def gather(state: StateDir, at: float) -> StatusData:
    """Query every process; the last known state stands in for one that does not answer."""
    try:
        supervisor = SupervisorClient(state).status()
    except Unreachable:
        return StatusData(state_dir=str(state.root), at=at, supervisor=None)
    deployment = parse(supervisor.document)
    models: tuple[ModelStatus, ...] = ()
    events: tuple[str, ...] = ()
    fleet, controller = None, "none: every model is external"
    controllers: dict[str, LeaderStatus | None] = {}
    external = external_models(deployment)
    token = state.admin_token()
    gateway = gateway_fleet(deployment.gateway, token) if external else None
    if deployment.needs_controller:
        client = ControllerClient(deployment.cluster.controller, state.secret(), timeout_s=3.0)
        try:
            answer, fleet = client.status(), client.fleet()
            models, events = answer.models, answer.events
            controller = f"{answer.actuator}, pid {answer.pid}"
        except Unreachable:
            controller = "does not answer"
        if deployment.cluster.election is not None:
            controllers = client.leaders()
    if fleet is None:
        gateway = gateway or gateway_fleet(deployment.gateway, token)
        fleet = (
            gateway.fleet
            if gateway is not None
            else state.load(state.fleet_path, FleetSnapshot) or EMPTY_FLEET
        )
    servers = gateway.servers(deployment, at) if gateway is not None else ()
    # The controller knows those of models that are scaled, but not why one does not serve.
    scaled = {model.name for model in models}
    servers = tuple(each for each in servers if each.model not in scaled or each.reason)
    fleet = msgspec.structs.replace(fleet, replicas=fleet.replicas + servers)
    if not models:
        models = _last_known(deployment, fleet)
    known = {model.name for model in models}
    models += tuple(
        _external(name, servers if gateway is not None else None) for name in external if name not in known
    )
    return StatusData(
        state_dir=str(state.root),
        at=at,
        supervisor=msgspec.structs.replace(supervisor, document=redact(supervisor.document)),
        models=models,
        fleet=fleet,
        fleet_age_s=max(0.0, at - fleet.at) if fleet.at else 0.0,
        controller=controller,
        controllers=controllers,
        access=_access(deployment, state),
        ledger=_ledger(state),
        events=events,
    )


def _ledger(state: StateDir) -> LedgerStatus | None:
    """How far this host's ledger is behind, ``None`` if it is unknown."""
    try:
        return AccountingClient(state).ledger()
    except Unreachable:
        return None


def _access(deployment: Deployment, state: StateDir) -> str:
    """Who may use the client port."""
    gateway = deployment.gateway
    if deployment.tenants or has_tenants(state) or not may_be_open(gateway):
        return "with a key"
    return "without a key: this machine" if is_loopback(gateway.host) else "without a key: every machine"


def _external(name: str, servers: Sequence[Replica] | None) -> ModelStatus:
    """An external model; its note says how many of its servers serve it, unless all do."""
    mine = [server for server in servers or () if server.model == name]
    ready = [server for server in mine if server.state is ReplicaPhase.READY]
    return ModelStatus(
        name=name,
        engine=EngineKind.EXTERNAL.value,
        mode=", ".join(sorted({server.mode for server in ready} - {""})),
        shape=", ".join(sorted({server.shape for server in ready} - {""})),
        generation=0,
        target=0,
        ready=len(ready),
        phase="external",
        note="" if ready and len(ready) == len(mine) else summary(name, servers),
    )


def _last_known(deployment: Deployment, fleet: FleetSnapshot) -> tuple[ModelStatus, ...]:
    """Models as in the fleet last published, without the controller's view of their phase."""
    known = {model.name: model for model in fleet.models}
    rows = []
    for spec in deployment.models:
        if not spec.is_scaled:
            continue
        model = known.get(spec.name) or Model(name=spec.name, engine=spec.engine, mode=spec.first_mode)
        ready = sum(r.model == spec.name and r.state == "ready" for r in fleet.replicas)
        rows.append(
            ModelStatus(
                name=spec.name,
                engine=str(spec.engine),
                mode=model.mode,
                shape=model.shape,
                generation=model.generation,
                target=model.target,
                ready=ready,
                phase="unknown",
                note=model.note,
            )
        )
    return tuple(rows)


_COLORS = {
    "ready": "green", "steady": "green", "external": "green", "starting": "yellow", "switching": "yellow",
    "draining": "yellow", "draining the old": "yellow", "recovering": "yellow", "stopping": "yellow",
    "stopped": "red", "unknown": "red",
}  # fmt: skip
# The fleet is published at least once a second, the ledger written every half second.
_STALE_S = 5.0
_ADAPTERS_SHOWN = 3


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
        sys.exit(ExitCode.NOT_RUNNING)


def render(view: StatusData) -> RenderableType:
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
        header.add_row("phase", colored(view.supervisor.phase))
        header.add_row("uptime", age(view.at - view.supervisor.since))
        if view.supervisor.endpoint:  # else only a controller runs here
            header.add_row("endpoint", f"{view.supervisor.endpoint}/v1")
            header.add_row("access", Text(view.access, style="red" if "every" in view.access else ""))
            header.add_row("page", f"{view.supervisor.admin}/ (token: {view.state_dir}/admin-token)")
    header.add_row("controller", view.controller)
    for address, known in view.controllers.items():
        header.add_row("", f"{address}: {_election(known)}")
    if (ledger := view.ledger) is not None and (ledger.behind_s > _STALE_S or ledger.lost):
        waiting = f"{ledger.waiting} requests wait, {ledger.lost} are lost"
        header.add_row("ledger", Text(f"behind by {age(ledger.behind_s)}: {waiting}", style="red"))
    return header


def _election(known: LeaderStatus | None) -> str:
    """What a controller says of the election."""
    if known is None:
        return "does not answer"
    renewed = "" if known.renewed_s is None else f", lease renewed {known.renewed_s:.1f} s ago"
    trouble = f" ({known.trouble})" if known.trouble else ""
    if known.leads:
        return f"leads in term {known.term}{renewed}, of {known.lease_s:g} s{trouble}"
    return f"stands by{renewed if known.leader else ''}{trouble}"


def _processes(processes: tuple[ProcessStatus, ...]) -> Table:
    return table(
        processes,
        ("process", lambda process: process.name),
        (">pid", lambda process: process.pid or Text("down", style="red")),
        (">restarts", lambda process: process.restarts),
        (">uptime", lambda process: age(process.up_s) if process.pid else ""),
    )


def _models(models: tuple[ModelStatus, ...]) -> Table:
    return table(
        models,
        ("model", lambda model: Text(model.name, style="bold")),
        ("engine", lambda model: model.engine),
        ("mode", lambda model: model.mode or None),
        (">revision", lambda model: model.generation),
        (
            ">desired/ready",
            lambda model: f"{'-' if model.phase == 'external' else model.target}/{model.ready}",
        ),
        ("phase", _phase),
        ("note", lambda model: Text(model.note, style="dim")),
    )


def _phase(model: ModelStatus) -> Text:
    unserved = model.phase == EngineKind.EXTERNAL and not model.ready
    return Text(model.phase, style="red") if unserved else colored(model.phase)


def _scaling(models: Sequence[ModelStatus], at: float) -> Table:
    """What scales each model, and the last decision; ``tidegate explain`` has the details."""
    return table(
        models,
        ("model", lambda model: Text(model.name, style="bold")),
        ("scaled by", lambda model: _scaled_by(model, at)),
        (">forecast", lambda model: optional(model.forecast, rate)),
        ("capacity per replica", lambda model: _capacity(model.capability)),
        (">last decision", lambda model: optional(model.decided_at, lambda then: f"{age(at - then)} ago")),
        ("reason", lambda model: _reason(model, at)),
    )


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


def _capacity(capability: Capability | None) -> str | None:
    """The rate of one replica within the SLO, or its maximum rate if it cannot meet the SLO at any rate."""
    if capability is None:
        return None
    calibrated = f" (model v{capability.version})" if capability.version else ""
    if capability.mu:
        return f"{rate(capability.mu)}{calibrated}"
    return f"max {rate(capability.mu_max)}, SLO missed{calibrated}"


def _replicas(view: StatusData) -> Table:
    replicas = sorted(view.fleet.replicas, key=lambda replica: replica.id)
    explained = any(replica.reason for replica in replicas)
    with_mode = any(replica.mode for replica in replicas)
    # Of servers that others start; `tidegate adapters` shows those of Tidegate's replicas.
    served = any(replica.adapters for replica in replicas if not replica.pid)
    return table(
        replicas,
        ("replica", lambda replica: replica.id),
        ("shape", lambda replica: replica.shape or None),
        *((("mode", lambda replica: replica.mode or None),) if with_mode else ()),
        (">revision", lambda replica: replica.generation),
        ("state", _replica_state),
        (">load", lambda replica: _load(replica.load)),
        (">running/waiting", lambda replica: f"{replica.load.running}/{replica.load.waiting}"),
        (">KV cache", lambda replica: f"{replica.load.kv_used:.0%}"),
        (">updated", lambda replica: f"{age(view.at - replica.load.at)} ago" if replica.load.at else None),
        ("node", lambda replica: replica.node or None),
        ("url", lambda replica: replica.url.removeprefix("http://") or None),
        (">pid", lambda replica: replica.pid or None),
        *((("adapters", lambda replica: _adapters(replica) or None),) if served else ()),
        *((("reason", lambda replica: Text(replica.reason, style="red")),) if explained else ()),
    )


def _adapters(replica: Replica) -> str:
    shown, more = replica.adapters[:_ADAPTERS_SHOWN], len(replica.adapters) - _ADAPTERS_SHOWN
    return "" if replica.pid else ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _load(load: ReplicaLoad) -> str:
    return f"{load.in_flight}/{load.bound}" if load.bound else str(load.in_flight)


def _replica_state(replica: Replica) -> Text:
    state = colored(str(replica.state))
    if replica.failures:
        state.append(f", failed {replica.failures} times", style="red")
    return state


def colored(word: str) -> Text:
    """A phase or state in its colour."""
    return Text(word, style=_COLORS.get(word, ""))
