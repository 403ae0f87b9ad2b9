"""What one run of the twin comes down to: how many were served how well, and what it took."""

from __future__ import annotations

import msgspec
import numpy as np

from sim.twin.record import HOUR_S, LOST, Floats, Outcome, Record, finite_quantiles


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace, of all its models together.

    ``attainment`` is the part of all ``requests`` that were served within the SLO of their model,
    ``goodput_rps`` how many of those there were in a second of the run. ``failed`` are those that nobody
    answered: ``refused`` ones, those that ``expired`` in the queue, and those that broke off. Quantiles are
    over the requests that have the figure, in seconds; ITL is each request's mean. ``gpu_hours`` are of cores
    where the deployment has no GPUs. ``cost`` is in the currency of the budget, ``overflow_cost`` in that of
    the upstreams. ``oracle_ratio`` is ``gpu_hours`` over the lower bound. ``None`` is what there is no number
    for.
    """

    attainment: float | None
    gpu_hours: float
    oracle_ratio: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p95_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p95_s: float | None
    itl_p99_s: float | None
    e2e_p50_s: float | None
    e2e_p95_s: float | None
    e2e_p99_s: float | None
    goodput_rps: float
    switches: int
    requests: int
    failed: int
    refused: int
    expired: int
    overflown: int
    preemptions: int
    adapter_loads: int
    decisions: int
    cost: float
    overflow_cost: float
    joules: float


def summarise(record: Record, lower_gpu_hours: float | None = None) -> Summary:
    """The summary of ``record``; ``lower_gpu_hours`` is what no plan can do with less than."""
    tables = list(record.requests.values())
    count = sum(len(table) for table in tables)
    met = sum(int(np.count_nonzero(table.met)) for table in tables)
    became = [sum(int(np.count_nonzero(table.outcome == each)) for table in tables) for each in Outcome]

    def joined(name: str) -> Floats:
        return np.concatenate([np.empty(0), *(getattr(table, name) for table in tables)])

    ttft = finite_quantiles(joined("ttft_s"), (0.5, 0.9, 0.95, 0.99))
    itl = finite_quantiles(joined("itl_s"), (0.5, 0.95, 0.99))
    e2e = finite_quantiles(joined("e2e_s"), (0.5, 0.95, 0.99))
    gpu_hours = record.gpu_s / HOUR_S
    return Summary(
        attainment=met / count if count else None,
        gpu_hours=gpu_hours,
        oracle_ratio=gpu_hours / lower_gpu_hours if lower_gpu_hours else None,
        ttft_p50_s=ttft[0],
        ttft_p90_s=ttft[1],
        ttft_p95_s=ttft[2],
        ttft_p99_s=ttft[3],
        itl_p50_s=itl[0],
        itl_p95_s=itl[1],
        itl_p99_s=itl[2],
        e2e_p50_s=e2e[0],
        e2e_p95_s=e2e[1],
        e2e_p99_s=e2e[2],
        goodput_rps=met / record.ends_at if record.ends_at > 0 else 0.0,
        switches=record.switches,
        requests=count,
        failed=sum(became[each] for each in LOST),
        refused=became[Outcome.REFUSED],
        expired=became[Outcome.EXPIRED],
        overflown=became[Outcome.OVERFLOWN],
        preemptions=record.preemptions,
        adapter_loads=record.adapter_loads,
        decisions=len(record.decisions),
        cost=record.cost,
        overflow_cost=record.overflow_cost,
        joules=record.joules,
    )
