"""The vocabulary: replicas, models, fleets and their load.

Durations are seconds and end in ``_s``; instants are Unix seconds named ``at``; fractions are 0..1.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EngineKind(StrEnum):
    """The engine of a model."""

    VLLM = "vllm"
    SIM = "sim"
    EXTERNAL = "external"


class ReplicaProtocol(StrEnum):
    """How gateway workers talk to replicas: all requests of a worker on one connection, or HTTP/1.1."""

    FRAMES = "frames"
    HTTP = "http"


class Runner(StrEnum):
    """The task of a model: text generation, or embeddings and scores."""

    GENERATE = "generate"
    POOLING = "pooling"


class ReplicaPhase(StrEnum):
    """The phase of a replica; only ``READY`` ones get traffic.

    ``ASLEEP`` replicas left their GPUs to another engine of their shared GPU group.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    STOPPED = "stopped"


class StartPath(StrEnum):
    """How a replica starts: first load of the weights on a node, a later load, or a wake-up."""

    COLD = "cold"
    CACHED = "cached"
    SLEEPING = "sleeping"


class Priority(StrEnum):
    """Priorities of requests, the highest first; set by the tenant, never by the request.

    ``SHEDDABLE`` requests are rejected first under overload, ``BATCH`` uses spare capacity.
    """

    CRITICAL = "critical"
    STANDARD = "standard"
    SHEDDABLE = "sheddable"
    BATCH = "batch"


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load that a replica reports at ``at``.

    ``in_flight`` requests are inside the guard, which admits ``bound``; ``running`` and ``waiting`` are the
    engine's counts, ``kv_used`` the fraction of KV cache in use. ``tokens`` counts scheduled tokens since the
    engine started. ``pending_tokens`` are the announced prompt tokens of requests without a first byte: the
    prefill ahead of a new request.
    """

    in_flight: int = 0
    bound: int = 0
    running: int = 0
    waiting: int = 0
    at: float
    kv_used: float = 0.0
    tokens: int = 0
    pending_tokens: int = 0


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with its own HTTP address.

    ``url`` is empty until the engine listens. ``generation`` numbers the configuration it was built from,
    ``incarnation`` counts restarts of its engine in place, ``failures`` consecutive failed ones. ``start_s``
    is the duration of the last start, by ``start_path``, ``wake_s`` that of the last wake-up. ``cards`` are
    its GPUs in a shared GPU group, by position. ``mode`` is that for which a server of an external model was
    started, if that is known.
    """

    id: str
    model: str
    shape: str
    generation: int
    state: ReplicaPhase
    load: ReplicaLoad
    url: str = ""
    node: str = ""
    incarnation: int = 0
    pid: int = 0
    adapters: tuple[str, ...] = ()
    reason: str = ""
    start_s: float | None = None
    start_path: StartPath = StartPath.CACHED
    failures: int = 0
    max_model_len: int | None = None
    wake_s: float | None = None
    cards: tuple[int, ...] = ()
    mode: str = ""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that clients name in ``model``, and its desired state.

    Replicas of another shape or generation drain in ``closes_s`` seconds, if that is not ``None``: until then
    they take the requests that end before. ``counts`` are the desired counts by shape of a model whose
    replicas another autoscaler starts and ends.
    """

    name: str
    engine: EngineKind
    runner: Runner = Runner.GENERATE
    mode: str = ""
    shape: str = ""
    target: int = 0
    generation: int = 0
    max_model_len: int | None = None
    created: int = 0
    note: str = ""
    closes_s: float | None = None
    counts: dict[str, int] = {}


class FleetSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable snapshot of models and replicas.

    ``epoch`` is the start of the controller that wrote it, so snapshots of a restarted controller are newer;
    ``version`` orders within an epoch. ``term`` is that of an elected controller, else 0.
    """

    epoch: float
    version: int
    at: float
    models: tuple[Model, ...] = ()
    replicas: tuple[Replica, ...] = ()
    term: int = 0


EMPTY_FLEET = FleetSnapshot(epoch=0.0, version=0, at=0.0)
