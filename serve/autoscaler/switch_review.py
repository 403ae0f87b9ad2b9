"""The predicted saving of a mode switch made by load, compared with the measured one."""

from __future__ import annotations

import msgspec

from policy.scaling.decision_types import Decision, Situation
from policy.scaling.mode_selection import measured_cost
from serve.controller_messages import SwitchOutcome
from serve.state.desired_state import ExpectedGain

# Latencies are measured over a minute, which must be one after the switch.
MEASURED_S = 75.0


def expected_gain(decision: Decision, situation: Situation) -> ExpectedGain | None:
    """The predicted saving of the switch that ``decision`` makes; ``None`` without measurements."""
    measured = measured_cost(situation)
    if decision.gain is None or measured is None or decision.mode == decision.was_mode:
        return None
    cost, met = measured
    return ExpectedGain(
        at=decision.at, was=decision.was_mode, mode=decision.mode, gain=decision.gain, cost=cost, met=met
    )


def due(promise: ExpectedGain, settled: bool, at: float) -> tuple[ExpectedGain, bool]:
    """``promise`` with when its replicas were ready, and whether it can be reviewed by now."""
    if promise.settled_at is None:
        return (msgspec.structs.replace(promise, settled_at=at) if settled else promise), False
    return promise, at - promise.settled_at >= MEASURED_S


def outcome(promise: ExpectedGain, situation: Situation) -> SwitchOutcome | None:
    """The measured saving, or ``None`` where requests no longer arrive."""
    measured = measured_cost(situation)
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
