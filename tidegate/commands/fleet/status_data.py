"""What there is to show: gathered from the supervisor, the controller and the gateways."""

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


class _Seen(msgspec.Struct, frozen=True):
    """A server as one gateway worker sees it."""

    id: str
    model: str
    url: str
    state: ReplicaPhase
    in_flight: int = 0
    bound: int = 0


class _AdminFleet(msgspec.Struct, frozen=True):
    """What of ``/admin/fleet`` is shown."""

    fleet: Fleet
    replicas: tuple[_Seen, ...] = ()

    def whole(self, at: float) -> Fleet:
        """The fleet, with the servers that no controller knows."""
        known = {replica.id for replica in self.fleet.replicas}
        external = tuple(
            Replica(
                id=seen.id, model=seen.model, shape="", generation=0, state=seen.state, url=seen.url,
                load=Load(at=at, in_flight=seen.in_flight, bound=seen.bound),
            )
            for seen in self.replicas
            if seen.id not in known
        )  # fmt: skip
        fleet = msgspec.structs.replace(self.fleet, replicas=self.fleet.replicas + external)
        return fleet if known else msgspec.structs.replace(fleet, at=at)


class StatusData(msgspec.Struct, frozen=True, kw_only=True):
    """Everything there is to show; ``fleet_age_s`` says how old the replicas' part is.

    The supervisor's document is without its secrets.
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
    """Ask everyone; who does not answer is replaced by what was last known."""
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
    fleet, word = None, "none: every model is external"
    if deployment.needs_controller:
        client = ControllerClient(deployment.cluster.controller, state.secret(), timeout_s=3.0)
        try:
            answer, fleet = client.status(), client.fleet()
            models, events, word = answer.models, answer.events, f"{answer.actuator}, pid {answer.pid}"
        except Unreachable:
            word = "does not answer"
    if fleet is None:
        fleet = _known_fleet(state, supervisor, at)
    return StatusData(
        state_dir=str(state.root),
        at=at,
        supervisor=msgspec.structs.replace(supervisor, document=redact(supervisor.document)),
        models=models or _guessed(deployment, fleet),
        fleet=fleet,
        fleet_age_s=max(0.0, at - fleet.at) if fleet.at else 0.0,
        controller=word,
        events=events,
    )


def _known_fleet(state: StateDir, supervisor: SupervisorStatus, at: float) -> Fleet:
    """What a gateway knows, else what one last wrote down."""
    try:
        with urllib.request.urlopen(f"{supervisor.admin}/admin/fleet", timeout=2.0) as answer:  # noqa: S310 - ours
            return msgspec.json.decode(answer.read(), type=_AdminFleet).whole(at)
    except (OSError, msgspec.MsgspecError):
        return state.load(state.fleet_path, Fleet) or EMPTY_FLEET


def _guessed(deployment: Deployment, fleet: Fleet) -> tuple[ModelStatus, ...]:
    """Models as the fleet last showed them, with no controller to say what they are doing."""
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
