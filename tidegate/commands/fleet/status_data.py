"""What ``status`` shows: gathered from the supervisor, the controller and the gateways."""

from __future__ import annotations

import urllib.request

import msgspec

from policy.config.deployment import Deployment
from policy.document.parse import parse
from policy.errors import Unreachable
from policy.types import EMPTY_FLEET, Fleet, Load, Replica, ReplicaPhase
from serve.controller.client import ControllerClient
from serve.controller_api import ModelStatus
from store.state_dir import StateDir
from tidegate.redaction import redact
from tidegate.supervisor.socket import SupervisorClient, SupervisorStatus


class _AdminReplica(msgspec.Struct, frozen=True):
    """A replica or external server as one gateway worker sees it."""

    id: str
    model: str
    url: str
    state: ReplicaPhase
    in_flight: int = 0
    bound: int = 0


class _AdminFleet(msgspec.Struct, frozen=True):
    """The part of ``/admin/fleet`` that is shown."""

    fleet: Fleet
    replicas: tuple[_AdminReplica, ...] = ()

    def with_external(self, at: float) -> Fleet:
        """The fleet with the external servers, which the controller does not know."""
        known = {replica.id for replica in self.fleet.replicas}
        external = tuple(
            Replica(
                id=server.id, model=server.model, shape="", generation=0, state=server.state, url=server.url,
                load=Load(at=at, in_flight=server.in_flight, bound=server.bound),
            )
            for server in self.replicas
            if server.id not in known
        )  # fmt: skip
        fleet = msgspec.structs.replace(self.fleet, replicas=self.fleet.replicas + external)
        return fleet if known else msgspec.structs.replace(fleet, at=at)


class StatusData(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment's status; ``fleet_age_s`` is the age of the replicas' part.

    The supervisor's deployment file has no secrets.
    """

    state_dir: str
    at: float
    supervisor: SupervisorStatus | None
    models: tuple[ModelStatus, ...]
    fleet: Fleet
    fleet_age_s: float
    controller: str
    events: tuple[str, ...] = ()


def gather(state: StateDir, at: float) -> StatusData:
    """Query every process; the last known state stands in for one that does not answer."""
    try:
        supervisor = SupervisorClient(state).status()
    except Unreachable:
        return StatusData(
            state_dir=str(state.root), at=at, supervisor=None, models=(), fleet=EMPTY_FLEET,
            fleet_age_s=0.0, controller="",
        )  # fmt: skip
    deployment = parse(supervisor.document)
    models: tuple[ModelStatus, ...] = ()
    events: tuple[str, ...] = ()
    fleet, controller = None, "none: every model is external"
    if deployment.needs_controller:
        client = ControllerClient(deployment.cluster.controller, state.secret(), timeout_s=3.0)
        try:
            answer, fleet = client.status(), client.fleet()
            models, events = answer.models, answer.events
            controller = f"{answer.actuator}, pid {answer.pid}"
        except Unreachable:
            controller = "does not answer"
    if fleet is None:
        fleet = _known_fleet(state, supervisor, at)
    return StatusData(
        state_dir=str(state.root),
        at=at,
        supervisor=msgspec.structs.replace(supervisor, document=redact(supervisor.document)),
        models=models or _last_known(deployment, fleet),
        fleet=fleet,
        fleet_age_s=max(0.0, at - fleet.at) if fleet.at else 0.0,
        controller=controller,
        events=events,
    )


def _known_fleet(state: StateDir, supervisor: SupervisorStatus, at: float) -> Fleet:
    """The fleet of a gateway, or else the one that a gateway stored last."""
    try:
        with urllib.request.urlopen(f"{supervisor.admin}/admin/fleet", timeout=2.0) as answer:  # noqa: S310 - ours
            return msgspec.json.decode(answer.read(), type=_AdminFleet).with_external(at)
    except (OSError, msgspec.MsgspecError):
        return state.load(state.fleet_path, Fleet) or EMPTY_FLEET


def _last_known(deployment: Deployment, fleet: Fleet) -> tuple[ModelStatus, ...]:
    """Models as in the fleet last published, without the controller's view of their phase."""
    known = {model.name: model for model in fleet.models}
    rows = []
    for spec in deployment.models:
        model = known.get(spec.name)
        ready = sum(r.model == spec.name and r.state == "ready" for r in fleet.replicas)
        rows.append(
            ModelStatus(
                name=spec.name,
                engine=str(spec.engine),
                mode=model.mode if model else spec.first_mode,
                shape=model.shape if model else "",
                generation=model.generation if model else 0,
                target=model.target if model else 0,
                ready=ready,
                phase="external" if spec.urls else "unknown",
                note=model.note if model else "",
            )
        )
    return tuple(rows)
