"""Capacity of one replica: the latencies to expect at a rate, and the highest rate within an SLO."""

from __future__ import annotations

import math

import msgspec

from policy.config.control import SloConfig
from policy.engine.engine_latency_model import EngineLatencyModel
from policy.engine.performance_model import EngineLoad, Timing

# Highest utilisation that is planned for: beyond it queues grow for long.
FULL = 0.85

# Relative precision of the highest rate within an SLO.
_PRECISION = 1e-3

# The utilisation of a replica without capacity: JSON has no infinity.
_OVER = 1e6


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of one replica for the present workload.

    ``mu`` requests per second within the SLO (0: it cannot be met), ``mu_max`` without one. ``kv_tokens`` and
    ``seats`` limit concurrency (0: not known). ``itl_s`` and ``ttft_s`` are the 95th percentiles at ``mu``.
    ``error`` and ``version`` are those of the engine model (version 0: as shipped, never fitted).
    """

    mu: float
    ttft_s: float = 0.0
    itl_s: float = 0.0
    mu_max: float
    kv_tokens: int = 0
    seats: int = 0
    error: float = 0.0
    version: int = 0


class ExpectedLatency(msgspec.Struct, frozen=True, kw_only=True):
    """Expected latencies at a replica: 95th percentiles in seconds, ``None`` if it cannot keep up.

    ``itl_p95_s`` is over the mean gaps of streams, as gateways measure it, ``gap_p95_s`` over single gaps.
    ``met`` is the fraction of requests within both targets, ``utilisation`` the rate over the maximum rate.
    """

    ttft_p95_s: float | None
    itl_p95_s: float | None
    gap_p95_s: float | None
    met: float
    utilisation: float


class IdleLatency(msgspec.Struct, frozen=True, kw_only=True):
    """The mean latencies in seconds of a request on an otherwise idle replica: what no count improves."""

    ttft_s: float
    itl_s: float
    e2e_s: float

    def missed(self, slo: SloConfig) -> tuple[tuple[str, float, float], ...]:
        """The targets that it misses: name, latency and target in seconds."""
        seen = (("TTFT", self.ttft_s, slo.ttft_p95_s), ("ITL", self.itl_s, slo.itl_p95_s))
        return tuple(
            (name, alone_s, limit_s)
            for name, alone_s, limit_s in seen
            if limit_s is not None and alone_s > limit_s
        )


def idle_latency(timing: Timing, workload: EngineLoad) -> IdleLatency:
    """The latencies of the mean request of ``workload``, whose rate is not read."""
    replica = EngineLatencyModel(timing, workload)
    point = replica.settle(0.0)
    ttft_s, itl_s = replica.ttft(point).mean, replica.itl(point).mean
    return IdleLatency(
        ttft_s=ttft_s, itl_s=itl_s, e2e_s=ttft_s + itl_s * max(0.0, workload.output_tokens - 1.0)
    )


def replicas_to_find_one_idle(load: float, busy: float) -> int:
    """The fewest replicas of which an arrival finds all occupied with a probability of at most ``busy``.

    ``load`` is the arrival rate times the seconds for which a request occupies a replica: Erlang's B formula,
    by its recursion.
    """
    blocked, count = 1.0, 0
    while blocked > busy:
        count += 1
        blocked = load * blocked / (count + load * blocked)
    return count


def latency_at(timing: Timing, workload: EngineLoad, slo: SloConfig) -> ExpectedLatency:
    """Expected latencies of ``workload`` with Poisson arrivals at one replica.

    Accuracy against :mod:`policy.engine.batch_scheduler` with requests of one length, at utilisations from
    0.2 to 0.8: ``itl_p95_s`` within 20 %, ``ttft_p95_s`` and ``gap_p95_s`` within 25 %. Where lengths vary
    (gamma inputs of shape 2, exponential outputs) TTFT is 1.3 to 2 times as long and ITL up to 1.5 times,
    either up to 3 times if prompts take several chunks: the workload has only means.
    """
    replica = EngineLatencyModel(timing, workload)
    if workload.lam >= replica.edge:
        utilisation = min(workload.lam / replica.edge, _OVER) if replica.edge else _OVER
        return ExpectedLatency(
            ttft_p95_s=None, itl_p95_s=None, gap_p95_s=None, met=0.0, utilisation=utilisation
        )
    point = replica.settle(workload.lam)
    itl, ttft = replica.itl(point), replica.ttft(point)
    return ExpectedLatency(
        ttft_p95_s=ttft.p95,
        itl_p95_s=itl.p95,
        gap_p95_s=replica.gap_p95_s(point),
        met=itl.within(slo.itl_p95_s) * ttft.within(slo.ttft_p95_s),
        utilisation=workload.lam / replica.edge,
    )


def capability(
    timing: Timing, workload: EngineLoad, slo: SloConfig, *, error: float = 0.0, version: int = 0
) -> Capability:
    """The capacity of one replica for ``workload``, whose rate is not read.

    ``mu`` is the largest rate at which both 95th percentiles are within ``slo``, to a thousandth from below,
    and at most :data:`FULL` of ``mu_max``. ``error`` and ``version`` are copied to the result.
    """
    replica = EngineLatencyModel(timing, workload)
    edge = replica.edge
    most_itl = math.inf if slo.itl_p95_s is None else slo.itl_p95_s
    most_ttft = math.inf if slo.ttft_p95_s is None else slo.ttft_p95_s

    def carries(lam: float) -> bool:
        point = replica.settle(lam)
        return replica.itl(point).p95 <= most_itl and replica.ttft(point).p95 <= most_ttft

    low, high = 0.0, FULL * edge
    if high and carries(high):
        low = high
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if carries(middle) else (low, middle)
        if high < _PRECISION * edge:
            low = 0.0
            break
    point = replica.settle(low) if low else None
    return Capability(
        mu=low,
        mu_max=edge,
        kv_tokens=timing.limits.kv_tokens,
        seats=timing.limits.max_num_seqs,
        ttft_s=0.0 if point is None else replica.ttft(point).p95,
        itl_s=0.0 if point is None else replica.itl(point).p95,
        error=error,
        version=version,
    )
