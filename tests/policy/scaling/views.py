"""Views of a given load for tests of policies, with plausible values for everything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policy.config.control import SloConfig
from policy.engine.replica_capacity import Capability, IdleLatency
from policy.scaling.view import Policy, Proposal, Supply, View
from policy.signals.types import LatencyQuantiles, ModelDemand, ReplicaSample, Signals
from tests.policy.control_play import NOON, rates

START = NOON


def demand(load: float = 0.0, *, concurrency: float | None = None, **more: Any) -> ModelDemand:
    """``load`` requests per second, each of which runs for four seconds unless ``concurrency`` is given."""
    level = 4.0 * load if concurrency is None else concurrency
    fields: dict[str, Any] = {"input_tokens": 1000.0, "output_tokens": 200.0} | more
    return ModelDemand(
        age_s=0.5, arrivals=rates(load), refused=rates(0.0), concurrency=rates(level), **fields
    )


def replicas(count: int, **figures: Any) -> tuple[ReplicaSample, ...]:
    return tuple(ReplicaSample(id=f"r{i}", age_s=0.5, **figures) for i in range(count))


def late(p95: float) -> LatencyQuantiles:
    return LatencyQuantiles(count=50, p50=p95 / 2, p90=p95, p95=p95, p99=p95)


def view(
    seen: ModelDemand | None = None,
    *,
    at: float = 0.0,
    count: int = 2,
    serving: int | None = None,
    starting_s: Sequence[float] = (),
    figures: tuple[ReplicaSample, ...] | None = None,
    least: int = 1,
    most: int = 20,
    lead_s: float = 30.0,
    queue_s: float = 60.0,
    capability: Capability | None = None,
    slo: SloConfig | None = None,
    idle: IdleLatency | None = None,
) -> View:
    """``at`` seconds after :data:`START`; a replica serves four requests per second within its SLO."""
    serving = count - len(starting_s) if serving is None else serving
    return View(
        at=START + at,
        tick_s=5.0,
        model="m",
        mode="multi-replica",
        count=count,
        least=least,
        most=most,
        supply=Supply(wanted=count, serving=serving, starting_s=tuple(starting_s)),
        signals=Signals(demand=seen, replicas=replicas(serving) if figures is None else figures),
        capability=capability or Capability(mu=4.0, mu_max=5.0, kv_tokens=100_000, seats=64),
        lead_s=lead_s,
        queue_s=queue_s,
        slo=SloConfig(ttft_p95_s=2.0) if slo is None else slo,
        idle=idle,
    )


def counts(
    policy: Policy, rows: Sequence[tuple[float, ModelDemand]], *, count: int = 2, **more: Any
) -> list[int]:
    """What is proposed at each row of (seconds, demand), where each proposal takes effect by the next row."""
    return [proposal.count for proposal in proposals(policy, rows, count=count, **more)]


def proposals(
    policy: Policy, rows: Sequence[tuple[float, ModelDemand]], *, count: int = 2, **more: Any
) -> list[Proposal]:
    memory, found = None, []
    for at, seen in rows:
        proposal = policy.decide(view(seen, at=at, count=count, **more), memory)
        count, memory = proposal.count, proposal.memory
        found.append(proposal)
    return found
