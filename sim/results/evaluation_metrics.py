"""The score of one run: attainment and GPU time of one model in a span of time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from sim.simulator.run_record import (
    HOUR_S,
    LOST,
    Floats,
    RequestColumns,
    RequestOutcome,
    RunRecord,
    finite_quantiles,
)

# Shorter windows have too few requests to judge a 99 % attainment.
WINDOW_S = 30.0


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one run, or on a part of it.

    ``attainment`` is the fraction of all ``requests`` served within the SLO, ``failed`` ones (refused,
    expired or cut off) included; ``goodput_rps`` counts those per second, ``goodput_per_gpu_hour`` per GPU-
    hour. Quantiles are in seconds over served requests, ITL by request; NaN without any. ``gpu_hours``
    include starts and drains, and are core-hours where there are no GPUs. ``recovery_s`` is the longest run
    of consecutive windows of :data:`WINDOW_S` below the SLO's attainment.
    """

    attainment: float
    gpu_hours: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p95_s: float
    goodput_rps: float
    goodput_per_gpu_hour: float
    recovery_s: float
    requests: int
    failed: int


@dataclass(frozen=True, slots=True)
class RunInterval:
    """The part of a run from ``since`` to before ``until``, in seconds."""

    since: float
    until: float

    def __post_init__(self) -> None:
        if not self.since < self.until:
            raise ValueError(f"a stretch from {self.since:g} to {self.until:g} s: expected a later end")


def score(record: RunRecord, model: str, stretch: RunInterval | None = None, promised: float = 0.99) -> Score:
    """The score of ``model`` in ``stretch`` of the run, or in all of it.

    A request belongs to the stretch in which it arrived. Raises :class:`ValueError` where none did, and
    :class:`KeyError` for an unknown model.
    """
    stretch = stretch or RunInterval(0.0, record.ends_at)
    requests = record.requests[model]
    mine = (requests.at >= stretch.since) & (requests.at < stretch.until)
    count = int(np.count_nonzero(mine))
    if not count:
        when = f"from {stretch.since:g} to {stretch.until:g} s"
        raise ValueError(f"no request of {model} came {when}: there is nothing to judge")
    met = int(np.count_nonzero(requests.met[mine]))
    gpu_hours = _gpu_s(record, model, stretch) / HOUR_S
    return Score(
        attainment=met / count,
        gpu_hours=gpu_hours,
        ttft_p50_s=_quantile(requests, mine, requests.ttft_s, 0.5),
        ttft_p99_s=_quantile(requests, mine, requests.ttft_s, 0.99),
        itl_p95_s=_quantile(requests, mine, requests.itl_s, 0.95),
        goodput_rps=met / (stretch.until - stretch.since),
        goodput_per_gpu_hour=met / gpu_hours if gpu_hours else math.nan,
        recovery_s=_recovery_s(requests.at[mine], requests.met[mine], stretch, promised),
        requests=count,
        failed=int(np.count_nonzero(np.isin(requests.outcome[mine], LOST))),
    )


def _quantile(requests: RequestColumns, mine: NDArray[np.bool_], values: Floats, part: float) -> float:
    (found,) = finite_quantiles(values[mine & (requests.outcome == RequestOutcome.SERVED)], (part,))
    return math.nan if found is None else found


def _gpu_s(record: RunRecord, model: str, stretch: RunInterval) -> float:
    """The GPU time of this model in this stretch, by the lifetimes of its replicas."""
    whole = mine = 0.0
    gpus = any(span.gpus for span in record.spans)
    for span in record.spans:
        ended_at = record.ends_at if span.ended_at is None else span.ended_at
        devices = span.gpus if gpus else span.cpus
        whole += devices * (ended_at - span.asked_at)
        if span.model == model:
            inside = min(ended_at, stretch.until) - max(span.asked_at, stretch.since)
            mine += devices * max(0.0, inside)
    # Shapes that share a GPU group hold it once: the total is the record's, not the sum of lifetimes.
    return record.gpu_s * mine / whole if whole else 0.0


def _recovery_s(at: Floats, met: NDArray[np.bool_], stretch: RunInterval, promised: float) -> float:
    """The longest time of consecutive windows below the SLO; a window without requests meets it."""
    windows = ((at - stretch.since) / WINDOW_S).astype(np.int64)
    came = np.bincount(windows)
    missed = np.bincount(windows, weights=met) < promised * came
    edges = np.flatnonzero(np.diff(missed, prepend=False, append=False))
    instants = np.minimum(edges * WINDOW_S, stretch.until - stretch.since)
    return float((instants[1::2] - instants[::2]).max(initial=0.0))
