"""External servers as the gateway sees them: whether they serve their model, and why not."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from policy.config.deployment import Deployment, GatewayConfig
from policy.types import EngineKind, FleetSnapshot, Replica, ReplicaLoad, ReplicaPhase
from tidegate.supervisor.readiness import call


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """A replica or external server as one gateway worker sees it."""

    id: str
    model: str
    url: str
    in_flight: int = 0
    bound: int = 0
    shape: str = ""
    mode: str = ""
    generation: int = 0
    adapters: tuple[str, ...] = ()
    state: ReplicaPhase
    reason: str = ""


class GatewayFleet(msgspec.Struct, frozen=True):
    """The part of ``/admin/fleet`` that is read here."""

    fleet: FleetSnapshot
    replicas: tuple[_Seen, ...] = ()

    def servers(self, deployment: Deployment, at: float) -> tuple[Replica, ...]:
        """The external servers that were probed, in the order of their models."""
        return tuple(
            Replica(
                id=server.id, model=server.model, shape=server.shape, generation=server.generation,
                mode=server.mode, adapters=server.adapters, state=server.state, url=server.url,
                load=ReplicaLoad(at=at, in_flight=server.in_flight, bound=server.bound), reason=server.reason,
            )
            for name in external_models(deployment)
            for server in self.replicas
            if server.model == name
        )  # fmt: skip


def external_models(deployment: Deployment) -> list[str]:
    return [spec.name for spec in deployment.models if spec.engine is EngineKind.EXTERNAL]


def gateway_fleet(gateway: GatewayConfig, token: str) -> GatewayFleet | None:
    """What a worker answers on the admin port, which wants the ``token``; ``None`` if none does."""
    status, body = call(gateway, "/admin/fleet", admin=True, key=token)
    try:
        return msgspec.json.decode(body, type=GatewayFleet) if status == 200 else None
    except msgspec.MsgspecError:
        return None


def summary(model: str, servers: Iterable[Replica] | None) -> str:
    """How many of the servers serve the ``model``; ``None`` if no gateway worker said."""
    if servers is None:
        return "no gateway worker answers on the admin port"
    states = [server.state for server in servers if server.model == model]
    if not states:
        return "its servers were not probed yet"
    noun = "server" if len(states) == 1 else "servers"
    return f"served by {states.count(ReplicaPhase.READY) or 'none'} of {len(states)} {noun}"


def reasons(model: str, servers: Iterable[Replica] | None) -> list[str]:
    """Each server that does not serve the ``model``, with the reason."""
    return [
        f"{server.url}: {server.reason}"
        for server in servers or ()
        if server.model == model and server.state is not ReplicaPhase.READY
    ]
