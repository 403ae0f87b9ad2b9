"""The summary of one simulated run, and several policies compared on the same arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from policy.config.control import SloConfig
from policy.config.deployment import Deployment
from policy.scaling.view import Policy
from sim.arrivals import Arrival
from sim.oracle.offline_optimum import GpuHourBounds
from sim.results.chart_series import ChartData, chart_data
from sim.simulator.run_record import HOUR_S, LOST, Floats, RequestOutcome, RunRecord, finite_quantiles


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One policy on one trace, over all models.

    ``attainment`` is the fraction of all ``requests`` served within the SLO of their model; ``goodput_rps``
    counts those per second of the run. ``failed`` requests got no answer: ``refused``, ``expired`` in the
    queue, or cut off. Quantiles are in seconds over the requests that have the value; ITL is each request's
    mean. ``gpu_hours`` are core-hours where there are no GPUs. ``cost`` is in the currency of the budget,
    ``spillover_cost`` in that of the fallback providers. ``oracle_ratio`` is ``gpu_hours`` over the lower
    bound. ``None``: no value.
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
    spilled_over: int
    preemptions: int
    adapter_loads: int
    decisions: int
    cost: float
    spillover_cost: float
    joules: float


def summarise(record: RunRecord, lower_gpu_hours: float | None = None) -> RunSummary:
    """The summary of ``record``; ``lower_gpu_hours`` is the lower bound of the offline optimum."""
    tables = list(record.requests.values())
    count = sum(len(table) for table in tables)
    met = sum(int(np.count_nonzero(table.met)) for table in tables)
    counts = [
        sum(int(np.count_nonzero(table.outcome == each)) for table in tables) for each in RequestOutcome
    ]

    def joined(name: str) -> Floats:
        return np.concatenate([np.empty(0), *(getattr(table, name) for table in tables)])

    quantiles: dict[str, float | None] = {}
    for name, parts in (("ttft", (50, 90, 95, 99)), ("itl", (50, 95, 99)), ("e2e", (50, 95, 99))):
        found = finite_quantiles(joined(f"{name}_s"), [part / 100 for part in parts])
        quantiles |= {f"{name}_p{part}_s": value for part, value in zip(parts, found, strict=True)}
    gpu_hours = record.gpu_s / HOUR_S
    return RunSummary(
        attainment=met / count if count else None,
        gpu_hours=gpu_hours,
        oracle_ratio=gpu_hours / lower_gpu_hours if lower_gpu_hours else None,
        **quantiles,
        goodput_rps=met / record.ends_at if record.ends_at > 0 else 0.0,
        switches=record.switches,
        requests=count,
        failed=sum(counts[each] for each in LOST),
        refused=counts[RequestOutcome.REFUSED],
        expired=counts[RequestOutcome.EXPIRED],
        spilled_over=counts[RequestOutcome.SPILLED_OVER],
        preemptions=record.preemptions,
        adapter_loads=record.adapter_loads,
        decisions=len(record.decisions),
        cost=record.cost,
        spillover_cost=record.spillover_cost,
        joules=record.joules,
    )


# Runs one policy; the callback gets the simulated seconds as they pass.
Play = Callable[[Deployment, Mapping[str, Policy], Iterable[Arrival], Callable[[float], None]], RunRecord]


class PolicyEntry(NamedTuple):
    """A policy of each model by name, and the deployment with them."""

    name: str
    deployment: Deployment
    policies: Mapping[str, Policy]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The result of one policy."""

    name: str
    summary: RunSummary
    pictures: tuple[ChartData, ...]


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """All runs on one trace; ``objectives`` by model."""

    trace: str
    seed: int
    bounds: GpuHourBounds
    objectives: Mapping[str, SloConfig]
    runs: tuple[PolicyRun, ...]

    def plain(self) -> dict[str, Any]:
        """The JSON output: ``None`` for missing values, no NaN."""
        return {
            "trace": self.trace,
            "seed": self.seed,
            "oracle": {
                "lower_gpu_hours": self.bounds.lower_gpu_hours,
                "achievable_gpu_hours": self.bounds.achievable_gpu_hours,
            },
            "policies": {run.name: msgspec.to_builtins(run.summary) for run in self.runs},
        }


def compare(
    contenders: Sequence[PolicyEntry],
    arrivals: Callable[[], Iterable[Arrival]],
    play: Play,
    *,
    trace: str,
    seed: int,
    bounds: GpuHourBounds,
    progress: Callable[[str, float], None] = lambda name, at: None,
    kept: Callable[[str, RunRecord], None] = lambda name, record: None,
) -> PolicyComparison:
    """Run each of ``contenders`` on ``arrivals``, which must be the same at each call.

    ``progress`` gets the simulated seconds of each, ``kept`` each whole record; only what the report draws
    stays in memory.
    """
    runs = []
    for name, deployment, policies in contenders:
        record = play(deployment, policies, arrivals(), partial(progress, name))
        kept(name, record)
        runs.append(PolicyRun(name, summarise(record, bounds.lower_gpu_hours), chart_data(record)))
    objectives = {spec.name: spec.control.slo for spec in contenders[0].deployment.models}
    return PolicyComparison(trace, seed, bounds, objectives, tuple(runs))
