"""An engine whose coefficients are known, and what a calibration would see of it."""

from __future__ import annotations

from policy.engine.performance_model import EngineModel, Limits
from policy.engine.scheduler import Request, Scheduler
from policy.engine.step_samples import StepSample
from sim.calibration.fit import Observation
from sim.calibration.load_points import Point, closed_loop


def steps(model: EngineModel, limits: Limits, point: Point, seconds: float) -> list[StepSample]:
    """Every step that the engine makes at ``point``."""
    scheduler = Scheduler(model, limits)
    found: list[StepSample] = []
    number, now = 0, 0.0
    for _ in range(point.concurrency):
        scheduler.submit(Request(str(number), point.input_tokens, point.output_tokens))
        number += 1
    while now < seconds:
        # What is in KV as a step is computed: after it, those that ended have given theirs back.
        step = scheduler.step()
        held = scheduler.kv_used + sum(point.input_tokens + point.output_tokens - 1 for _ in step.finished)
        now += model.step_time(step.scheduled, held, step.running)
        seconds_taken = model.step_time(step.scheduled, held, step.running)
        found.append(StepSample(1, step.scheduled, held, step.running, seconds_taken))
        for _ in step.finished:
            scheduler.submit(Request(str(number), point.input_tokens, point.output_tokens))
            number += 1
    return found


def seen(
    model: EngineModel, limits: Limits, points: list[Point], seconds: float, path_s: float = 0.0
) -> list[Observation]:
    """What all of ``points`` show."""
    return [
        Observation(
            point,
            seconds,
            steps(model, limits, point, seconds),
            closed_loop(model, limits, point, seconds, path_s),
        )
        for point in points
    ]
