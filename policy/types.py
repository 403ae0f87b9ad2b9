"""The vocabulary: what a replica, a fleet and a load are. Read this first.

Durations are seconds and end in ``_s``; instants are Unix seconds and are called ``at``;
fractions are 0..1.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class EngineKind(StrEnum):
    """What produces the tokens of a model."""

    VLLM = "vllm"
    SIM = "sim"
    EXTERNAL = "external"


class Runner(StrEnum):
    """What a model does: write text, or turn text into vectors and scores."""

    GENERATE = "generate"
    POOLING = "pooling"


class ReplicaPhase(StrEnum):
    """The life of a replica; traffic goes to ``READY`` alone.

    ``ASLEEP`` replicas left their GPUs to another of their shared GPU group; they are woken, not started.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    STOPPED = "stopped"


class Priority(StrEnum):
    """Priorities of requests, the highest first; the tenant's key decides, never the request.

    ``SHEDDABLE`` is turned away first when there is too much, ``BATCH`` runs in what is left over.
    """

    CRITICAL = "critical"
    STANDARD = "standard"
    SHEDDABLE = "sheddable"
    BATCH = "batch"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a replica at ``at``, as it counted it itself.

    ``in_flight`` counts requests inside the guard, ``bound`` is how many it admits;
    ``running`` and ``waiting`` are the engine's own split of them, ``kv_used`` the fraction of
    its KV cache in use. ``tokens`` counts scheduled tokens since the engine started.
    ``pending_tokens`` are the prompt tokens, as the gateways announced them, of requests that have
    not had their first byte: the prefill ahead of a request that arrives now.
    """

    at: float
    in_flight: int = 0
    bound: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    tokens: int = 0
    pending_tokens: int = 0


class StartPath(StrEnum):
    """What a start had to do.

    ``COLD`` is the first of these weights on a node: they are fetched, prepared or read from disk. ``CACHED``
    is any later one, ``SLEEPING`` only wakes an engine that was put to sleep.
    """

    COLD = "cold"
    CACHED = "cached"
    SLEEPING = "sleeping"


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine with its own HTTP address.

    ``url`` is empty until the engine listens. ``generation`` is the configuration of engine and
    weights it was built from, ``incarnation`` counts restarts of its engine in place, ``failures``
    the last ones of them in a row. ``start_s`` is how long the last start to ready took, by ``start_path``;
    ``wake_s`` the last wake of one that sleeps.
    """

    id: str
    model: str
    shape: str
    generation: int
    state: ReplicaPhase
    load: Load
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


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that clients name in ``model``, and its desired state."""

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


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """An immutable snapshot of models and replicas.

    ``epoch`` is the instant at which the controller that wrote it started, so a snapshot of a
    restarted controller is newer than any of its predecessor; ``version`` orders within an epoch.
    """

    epoch: float
    version: int
    at: float
    models: tuple[Model, ...] = ()
    replicas: tuple[Replica, ...] = ()


EMPTY_FLEET = Fleet(epoch=0.0, version=0, at=0.0)
