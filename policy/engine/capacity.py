"""Capacity of one replica: the latencies to expect at a rate, and the highest rate within an SLO."""

from __future__ import annotations

import math

import msgspec

from policy.config.control import SloConfig
from policy.engine.model import Timing, Workload
from policy.engine.queueing import QueueingModel

# Highest utilisation that is planned for: beyond it queues grow for long.
FULL = 0.85

# Relative precision of the highest rate within an SLO.
_PRECISION = 1e-3

# The utilisation of a replica that can do nothing: the log has no infinity.
_OVER = 1e6


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What one replica of a shape can do with requests like those of late.

    ``mu`` requests per second within the SLO (0: it cannot meet it at all), ``mu_max`` without one.
    ``kv_tokens`` and ``seats`` bound what runs at once (0: not known). ``itl_s`` and ``ttft_s`` are the 95th
    percentiles that it would show alone at ``mu``. ``error`` is the relative error of the engine model, of
    which it is ``version`` (0: as shipped, never fitted).
    """

    mu: float
    mu_max: float
    kv_tokens: int = 0
    seats: int = 0
    ttft_s: float = 0.0
    itl_s: float = 0.0
    error: float = 0.0
    version: int = 0


class ExpectedLatency(msgspec.Struct, frozen=True, kw_only=True):
    """What requests find at a replica: 95th percentiles in seconds, ``None`` where it cannot keep up.

    ``itl_p95_s`` is of the mean gap of each stream, as gateways judge it; ``gap_p95_s`` of single gaps, which
    is that of a step with a prompt in it once one gap in twenty has one. ``met`` is the part of the requests
    within both targets, ``utilisation`` the rate over that at which the replica no longer keeps up.
    """

    ttft_p95_s: float | None
    itl_p95_s: float | None
    gap_p95_s: float | None
    met: float
    utilisation: float


def latency_at(timing: Timing, workload: Workload, slo: SloConfig) -> ExpectedLatency:
    """What requests like ``workload`` find at one replica that they come to at that rate, at random.

    Against :mod:`policy.engine.scheduler` with Poisson arrivals of requests of one length (cpu-smollm2-135m
    on one and two cores, sim-small, h100-8b, h100-70b on four, up to four chunks a prompt, bounded by seats,
    by KV and by neither; answers of one to five tokens to prompts of several chunks), at 0.2, 0.5 and 0.8 of
    what keeps up: ``itl_p95_s`` within 20 %, ``ttft_p95_s`` within 25 %, ``gap_p95_s`` within 25 %; of
    answers of one token to prompts of one chunk ``ttft_p95_s`` within 20 %, from 0.1 on. Where
    lengths vary (input a gamma variable of shape 2, output an exponential one) TTFT is 1.3 to 2 times as
    long and ITL up to 1.5 times, either up to 3 times where prompts take several chunks: the workload has
    only their means.
    """
    replica = QueueingModel(timing, workload)
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
    timing: Timing, workload: Workload, slo: SloConfig, *, error: float = 0.0, version: int = 0
) -> Capability:
    """What one replica can do with requests like ``workload``, whose rate is not read.

    ``mu`` is the largest rate at which both 95th percentiles are within ``slo``, to a thousandth from below,
    and at most :data:`FULL` of ``mu_max``. ``error`` and ``version`` are those of the engine model, as given.
    """
    replica = QueueingModel(timing, workload)
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
