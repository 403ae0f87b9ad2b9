"""The record of a simulation: requests, replicas and decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policy.config.deployment import Gpus
from policy.scaling.decision_types import Decision
from policy.types import StartPath

HOUR_S = 3600.0

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# As many bits as their numbers need: there may be ten million.
Counts = NDArray[np.signedinteger[Any]]


def finite_quantiles(values: Floats, q: Sequence[float]) -> list[float | None]:
    """The quantiles ``q`` (0..1) of the finite ``values``, interpolated; ``None`` each without any."""
    known = values[np.isfinite(values)]
    if not len(known):
        return [None] * len(q)
    return [float(value) for value in np.quantile(known, q, overwrite_input=True)]


class RequestOutcome(IntEnum):
    """The outcome of a request."""

    SERVED = 0
    REFUSED = 1  # rejected on arrival, or displaced by another
    EXPIRED = 2  # waited in the gateway until its deadline
    FAILED = 3  # its replica crashed after it had begun, or could never hold it
    SPILLED_OVER = 4  # served by a fallback provider


# Neither a replica nor a fallback provider answered them.
LOST = (RequestOutcome.REFUSED, RequestOutcome.EXPIRED, RequestOutcome.FAILED)


@dataclass(frozen=True, slots=True)
class RequestColumns:
    """Every request of one model in the order of arrival, a column for each fact.

    Instants and durations are in seconds. ``queued_s`` is the wait in the gateway. ``ttft_s``, ``e2e_s`` and
    ``itl_s`` (the mean gap of its stream) are NaN where there was no such token. ``replica`` is the number of
    its :class:`ReplicaLifetime`, -1 for none. ``met`` is whether it was served within the SLO of its model.
    """

    at: Floats
    input_tokens: Counts
    output_tokens: Counts
    cached_tokens: Counts
    outcome: Counts
    queued_s: Floats
    ttft_s: Floats
    itl_s: Floats
    e2e_s: Floats
    replica: Counts
    met: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.at)


@dataclass(slots=True)
class ReplicaLifetime:
    """The life of one replica, from its request until its devices are free again, in seconds.

    ``ready_at`` and ``leaves_at`` are ``None`` where that did not happen. ``busy_s`` is the time with
    steps to run, ``tokens`` the number scheduled, ``joules`` the energy.
    """

    number: int
    model: str
    mode: str
    shape: str
    gpus: Gpus
    cpus: int
    path: StartPath
    asked_at: float
    ready_at: float | None = None
    crashed: bool = False
    leaves_at: float | None = None
    busy_s: float = 0.0
    ended_at: float | None = None
    tokens: int = 0
    joules: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelTickSample:
    """One model at a tick: requests per second since the last one, existing and desired replicas.

    ``met`` is the part of the requests of the last minute within the SLO.
    """

    at: float
    model: str
    arrivals: float
    queued: int
    running: int
    ready: int
    starting: int
    draining: int
    mode: str
    wanted: int
    met: float


@dataclass(slots=True)
class RunRecord:
    """One run: ``requests`` by model, from 0 to ``ends_at`` seconds; ``cost`` in the budget's currency.

    ``decisions`` are those that changed anything, at their instants; ``switches`` of the mode among them,
    ``adapter_loads`` of all replicas. ``gpu_s`` are the seconds that replicas held devices, starts and drains
    included: of GPUs, or of cores where the deployment has no GPUs.
    """

    ends_at: float
    requests: dict[str, RequestColumns]
    spans: list[ReplicaLifetime] = field(default_factory=list)
    moments: list[ModelTickSample] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    switches: int = 0
    adapter_loads: int = 0
    preemptions: int = 0
    gpu_s: float = 0.0
    cost: float = 0.0
    joules: float = 0.0
    spillover_cost: float = 0.0
