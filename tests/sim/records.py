"""Records of simulator runs, made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policy.engine.replica_capacity import Capability
from policy.scaling.decision_types import AppliedGuardrail, Decision, Guardrail
from policy.scaling.view import Proposal
from sim.simulator.run_record import ModelTickSample, RequestColumns, RequestOutcome, RunRecord

NAN = math.nan


def requests(
    at: Sequence[float] | NDArray[Any],
    ttft_s: Sequence[float] | NDArray[Any],
    *,
    itl_s: float = 0.02,
    met: Sequence[bool] | None = None,
    outcome: Sequence[int] | None = None,
) -> RequestColumns:
    """One request for each instant, with 100 tokens in and 11 out; served and met unless told otherwise."""
    count = len(at)
    ttft = np.array(ttft_s, dtype=np.float64)
    return RequestColumns(
        at=np.array(at, dtype=np.float64),
        input_tokens=np.full(count, 100),
        output_tokens=np.full(count, 11),
        cached_tokens=np.zeros(count, dtype=np.int64),
        outcome=np.array([RequestOutcome.SERVED] * count if outcome is None else outcome, dtype=np.int64),
        queued_s=np.zeros(count),
        ttft_s=ttft,
        itl_s=np.where(np.isfinite(ttft), itl_s, NAN),
        e2e_s=ttft + 10 * itl_s,
        replica=np.zeros(count, dtype=np.int64),
        met=np.array([True] * count if met is None else met),
    )


def moment(at: float, **more: float | int | str) -> ModelTickSample:
    usual: dict[str, float | int | str] = {
        "model": "m",
        "arrivals": 2.0,
        "queued": 0,
        "running": 3,
        "ready": 1,
        "starting": 0,
        "draining": 0,
        "mode": "multi-replica",
        "wanted": 1,
        "met": 1.0,
    }
    return ModelTickSample(at=at, **{**usual, **more})  # type: ignore[arg-type]


def decision(
    was: int, count: int, reason: str, *applied: AppliedGuardrail, mode: str = "multi-replica"
) -> Decision:
    return Decision(
        at=0.0,
        model="m",
        mode=mode,
        count=count,
        was_mode="multi-replica",
        was_count=was,
        reason=reason,
        proposal=Proposal(count=count, reason=reason),
        capability=Capability(mu=1.0, mu_max=2.0),
        applied_guardrails=applied,
    )


STEP = AppliedGuardrail(rule=Guardrail.STEP, was=5, now=2, why="at most doubled")


def record(minutes: int = 10) -> RunRecord:
    """A run that grows from one replica to two, switches its mode in the middle, and serves all but one."""
    end = 60.0 * minutes
    at = np.arange(0.0, end, 2.0)
    ttft = 0.1 + 0.2 * (np.arange(len(at)) % 10)
    ttft[3] = NAN
    outcome = [RequestOutcome.EXPIRED if i == 3 else RequestOutcome.SERVED for i in range(len(at))]
    half = end / 2
    moments = [
        moment(
            5.0 * i,
            queued=i % 7,
            ready=1 + (5.0 * i > half),
            starting=int(half / 2 < 5.0 * i <= half),
            wanted=1 + (5.0 * i > half / 2),
            mode="multi-replica" if 5.0 * i < half else "single-large",
            met=NAN if i == 0 else 0.9,
        )
        for i in range(1 + int(end / 5.0))
    ]
    return RunRecord(
        ends_at=end,
        requests={"m": requests(at, ttft, outcome=outcome, met=[i != 3 for i in range(len(at))])},
        moments=moments,
        decisions=[
            (half / 2, decision(1, 2, "up to 3 requests/s <are> expected & need 5", STEP)),
            (half, decision(2, 1, "single-large promises to cost 20% less", mode="single-large")),
        ],
        switches=1,
        gpu_s=3600.0,
        cost=4.0,
        joules=7.2e6,
    )
