"""A server of an external model as it describes itself: its shape, its mode, and adapters that it serves."""

from __future__ import annotations

from msgspec import structs

from policy.config.deployment import ModelSpec
from policy.config.external_servers import ExternalServer, server_shape
from policy.errors import ConfigError
from policy.scaling.reconcile_steps import LayerKey
from policy.types import Replica, ReplicaLoad, ReplicaPhase

MAX_PORT, MAX_DIGITS = 65_535, 5
# The shape of servers of which none is known.
EXTERNAL_SHAPE = "external"


class DiscoveredServer(ExternalServer, frozen=True, kw_only=True):
    """A server, listed or found, and the ``source`` of its shape and mode, for messages.

    ``replica`` is the id of its pod's replica, if it has one. Once it is :func:`resolved` its shape and mode
    are declared ones or empty, and ``problem`` says what is wrong with those that it was given.
    ``generation`` is that of its layer, for a pod that the controller scales.
    """

    source: str = ""
    replica: str = ""
    generation: int = 0
    problem: str = ""


def is_labelled(spec: ModelSpec) -> bool:
    """Whether labels of its pods may say something: of an external model with shapes or adapters."""
    return bool(spec.shapes) or spec.adapters is not None


def resolved(server: DiscoveredServer, spec: ModelSpec, layer: LayerKey | None) -> DiscoveredServer:
    """The server with what the deployment declares, and the controller knows of its ``layer``.

    A pod is of the shape whose workload it is of, whatever its labels say.
    """
    modes = {name: mode.shape for name, mode in spec.modes.items()}
    built = server_shape(server, spec.shapes, modes, server.source, layer.shape if layer is not None else "")
    shape = spec.shapes.get(built.shape)
    return structs.replace(
        server,
        shape=built.shape,
        mode=built.mode,
        generation=layer.generation if layer is not None else 0,
        max_in_flight=server.max_in_flight or (shape.max_in_flight if shape is not None else None),
        problem=server.problem if built.problem is None else str(built.problem),
    )


def with_kv_events(server: DiscoveredServer, port: str, replay_port: str) -> DiscoveredServer:
    """The server with the ports that its pod or service says its KV events have; wrong ones are not used."""
    ports: list[int | None] = []
    for key, value in (("kv-events-port", port), ("kv-events-replay-port", replay_port)):
        number = int(value) if value.isascii() and value.isdecimal() and len(value) <= MAX_DIGITS else 0
        if (value or not ports) and (not 0 < number <= MAX_PORT or number in ports):
            expected = "a port, 1 to 65535, another for each of the two"
            problem = str(ConfigError(f"{server.source}{key}", value, expected))
            return structs.replace(server, kv_events_port=None, kv_events_replay_port=None, problem=problem)
        ports.append(number or None)
    return structs.replace(server, kv_events_port=ports[0], kv_events_replay_port=ports[1])


def external_replica(
    model: str, url: str, *, adapters: tuple[str, ...], at: float, reason: str = ""
) -> Replica:
    """A server that Tidegate does not deploy; ``reason``: why it does not serve the model."""
    return Replica(
        id=url.partition("://")[2],
        model=model,
        shape=EXTERNAL_SHAPE,
        generation=0,
        state=ReplicaPhase.STOPPED if reason else ReplicaPhase.READY,
        load=ReplicaLoad(at=at),
        url=url,
        adapters=adapters,
        reason=reason,
    )


def with_server_details(server: DiscoveredServer, replica: Replica) -> Replica:
    """The replica with what its server is said to be; a wrong shape does not keep it from serving."""
    return structs.replace(
        replica,
        shape=server.shape or EXTERNAL_SHAPE,
        mode=server.mode,
        generation=server.generation,
        adapters=tuple(dict.fromkeys((*replica.adapters, *server.adapters))),
        reason=replica.reason or server.problem,
    )
