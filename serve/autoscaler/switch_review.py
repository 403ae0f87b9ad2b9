"""What a switch of mode by load promised, and what came of it: both by the cost of the mode as measured."""

from __future__ import annotations

import math

import msgspec

from policy.scaling.situation import Decision, ModeOption, Situation
from policy.signals.types import Demand
from serve.controller_api import SwitchOutcome
from serve.state.targets import ExpectedGain

# After it is there its requests fill the minute over which latencies are measured.
MEASURED_S = 75.0
# As far as one that misses its objective is told from another (policy.modes).
MOST = 4.0


def expected_gain(decision: Decision, situation: Situation) -> ExpectedGain | None:
    """The promise of a switch that ``decision`` makes by load; ``None`` where nothing can be measured."""
    measured = _measured(situation)
    if decision.gain is None or measured is None or decision.mode == decision.was_mode:
        return None
    cost, met = measured
    return ExpectedGain(
        at=decision.at, was=decision.was_mode, mode=decision.mode, gain=decision.gain, cost=cost, met=met
    )


def due(promise: ExpectedGain, settled: bool, at: float) -> tuple[ExpectedGain, bool]:
    """The promise with when its replicas were there, and whether it can be judged by now."""
    if promise.settled_at is None:
        return (msgspec.structs.replace(promise, settled_at=at) if settled else promise), False
    return promise, at - promise.settled_at >= MEASURED_S


def outcome(promise: ExpectedGain, situation: Situation) -> SwitchOutcome | None:
    """What came of it, or ``None`` where nobody asks any more."""
    measured = _measured(situation)
    if measured is None or promise.cost <= 0:
        return None
    cost, met = measured
    return SwitchOutcome(
        at=situation.at,
        model=situation.model,
        decided_at=promise.at,
        was=promise.was,
        mode=promise.mode,
        promised=promise.gain,
        measured=1.0 - cost / promise.cost,
        met_before=promise.met,
        met=met,
    )


def _measured(situation: Situation) -> tuple[float, float] | None:
    """The cost by the rule of :mod:`policy.scaling.mode_selection`, of what was measured, and which part met
    the objective."""
    demand = situation.signals.demand
    rung = next((rung for rung in situation.rungs if rung.mode == situation.mode), None)
    if demand is None or rung is None or demand.ttft is None:
        return None
    met = demand.met.both
    if met >= situation.slo.attainment:
        return max(1, situation.count) * _each(rung), met
    largest = max(each.most * _each(each) for each in situation.rungs)
    return largest * (1.0 + (1.0 - met) + _excess(situation, demand)), met


def _excess(situation: Situation, demand: Demand) -> float:
    slo = situation.slo
    pairs = ((demand.ttft, slo.ttft_p95_s), (demand.itl, slo.itl_p95_s))
    return sum(
        min(MOST, math.log2(measured.p95 / limit_s))
        for measured, limit_s in pairs
        if measured is not None and limit_s is not None and measured.p95 > limit_s
    )


def _each(rung: ModeOption) -> float:
    return rung.cost_per_h or float(rung.gpus or rung.cpus)
