"""Decisions as in the controller's log, for tests of their output."""

from __future__ import annotations

from typing import Any

import msgspec

from policy.config.control import GuardConfig, ModeSwitchConfig, ScaleConfig, SloConfig
from policy.engine.performance_model import BatchLimits, Timing
from policy.engine.replica_capacity import Capability
from policy.scaling.decision_types import (
    AppliedGuardrail,
    Decision,
    Guardrail,
    ModeForecast,
    ModeOption,
    ModeOverride,
    Situation,
)
from policy.scaling.view import Proposal, Supply
from policy.signals.types import LatencyQuantiles, ModelDemand, Rates, ReplicaSample, Shares, Signals

LIMITS = BatchLimits(max_num_batched_tokens=2048, max_num_seqs=64, kv_tokens=50_000)


def rates(short: float, long: float) -> Rates:
    return Rates(last_6_s=short, last_20_s=short, last_60_s=long, last_600_s=long)


def quantiles(p95: float) -> LatencyQuantiles:
    return LatencyQuantiles(count=600, p50=p95 / 2, p90=p95 * 0.9, p95=p95, p99=p95 * 1.2)


DEMAND = ModelDemand(
    age_s=0.4,
    arrivals=rates(11.84, 9.2),
    refused=rates(0.25, 0.1),
    concurrency=rates(31.0, 25.0),
    queued=3,
    oldest_s=0.8,
    ttft=quantiles(1.32),
    itl=quantiles(0.041),
    met=Shares(ttft=0.9, itl=1.0, both=0.9),
    input_tokens=256.0,
    output_tokens=64.0,
    hit=0.31,
)
SIGNALS = Signals(
    demand=DEMAND,
    replicas=(
        ReplicaSample(id="sim-small-1", age_s=0.3, running=12, waiting=1, kv_used=0.62),
        ReplicaSample(id="sim-small-2", age_s=0.5, running=14, waiting=2, kv_used=0.71),
    ),
)
OPTIONS = (
    ModeOption(
        mode="multi-replica", shape="small", least=1, most=6, timing=Timing(limits=LIMITS), gpus=1, version=3,
        error=0.06, lead_s=6.0,
    ),
    ModeOption(
        mode="single-large", shape="large", least=1, most=1, timing=Timing(limits=LIMITS), gpus=4, lead_s=9.0
    ),
)  # fmt: skip


def situation(**over: Any) -> Situation:
    fields: dict[str, Any] = {
        "at": 1000.0, "tick_s": 5.0, "model": "sim", "priority": 0, "mode": "multi-replica", "count": 2,
        "settled": True, "mode_options": OPTIONS, "supply": Supply(wanted=2, serving=2, starting_s=(4.0,)),
        "signals": SIGNALS, "slo": SloConfig(ttft_p95_s=1.0, itl_p95_s=0.05), "scale": ScaleConfig(),
        "switching": ModeSwitchConfig(), "guard": GuardConfig(), "queue_s": 60.0,
    }  # fmt: skip
    return Situation(**fields | over)


PROPOSAL = Proposal(
    count=6,
    reason="12.4/s are expected when a start begun now is ready",
    terms={"forecast": 5.4, "last_20_s": 3.83, "saturation": 2.9, "queue": 0.3},
    forecast=12.4,
    forecast_high=16.1,
)
OUTLOOKS = (
    ModeForecast(mode="multi-replica", count=4, cost=4.0, met=0.995, ttft_s=0.42, itl_s=0.041),
    ModeForecast(mode="single-large", count=1, cost=9.3, met=0.2, why="cannot keep up with 16.1/s"),
)


def decision(**over: Any) -> Decision:
    fields: dict[str, Any] = {
        "at": 1000.0, "model": "sim", "mode": "multi-replica", "count": 4, "was_mode": "multi-replica",
        "was_count": 2, "reason": "load rises: 16.1/s at most, and a replica takes 3.40/s",
        "proposal": PROPOSAL,
        "capability": Capability(mu=3.4, mu_max=5.1, error=0.06, version=3),
        "applied_guardrails": (
            AppliedGuardrail(
                rule=Guardrail.STEP, was=6, now=4, why="2 more at once (control.scale.max_step_up 1)"
            ),
        ),
        "mode_forecasts": OUTLOOKS, "shadow": Proposal(count=5, reason="queue 3 of 2"),
        "others": {"static": 1, "panic_window": 6},
    }  # fmt: skip
    return Decision(**fields | over)


def unchanged(at: float = 1005.0, **over: Any) -> Decision:
    """The next decision, which keeps the target."""
    return msgspec.structs.replace(decision(), at=at, was_count=4, applied_guardrails=(), **over)


OVERRIDE = ModeOverride(mode="multi-replica", count=3, until=2800.0)
