"""The predicted saving of a mode switch made by load, compared with the measured one."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from policy.scaling.decision_types import Decision, Situation
from policy.scaling.replica_size_mode_selection import measured_cost
from serve.controller_api_schema import SwitchOutcome
from serve.state.desired_state import ExpectedGain, ModelTarget

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


def review(
    target: ModelTarget, at: float, situation: Callable[[], Situation]
) -> tuple[ExpectedGain | None, SwitchOutcome | None]:
    """The predicted saving that is still to be reviewed after ``at``, and the outcome if it was reviewed now.

    There is no outcome where requests no longer arrive.
    """
    promise = target.promise
    if promise is None or promise.mode != target.aim.mode:
        return None, None
    if promise.settled_at is None:
        return (replace(promise, settled_at=at) if target.settled else promise), None
    if at - promise.settled_at < MEASURED_S:
        return promise, None
    measured = measured_cost(situation())
    if measured is None or promise.cost <= 0:
        return None, None
    cost, met = measured
    return None, SwitchOutcome(
        at=at,
        model=target.spec.name,
        decided_at=promise.at,
        was=promise.was,
        mode=promise.mode,
        promised=promise.gain,
        measured=1.0 - cost / promise.cost,
        met_before=promise.met,
        met=met,
    )
