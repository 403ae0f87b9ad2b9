"""Known coefficients of an engine are recovered from its measured load points."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from policy.engine.batch_scheduler import BatchScheduler, EngineRequest
from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import BatchLimits, EngineModel
from policy.engine.step_samples import StepSample
from policy.errors import PreconditionFailed
from sim.calibration.experiment_design import CalibrationPoint, closed_loop, plan_points
from sim.calibration.fit import FitResult, LoadPointObservation, fit_model, initial_guess


def steps(
    model: EngineModel, limits: BatchLimits, point: CalibrationPoint, seconds: float
) -> list[StepSample]:
    scheduler = BatchScheduler(model, limits)
    found: list[StepSample] = []
    number, now = 0, 0.0
    for _ in range(point.concurrency):
        scheduler.submit(EngineRequest(str(number), point.input_tokens, point.output_tokens))
        number += 1
    while now < seconds:
        # KV tokens during the step: afterwards the ended requests have freed theirs.
        step = scheduler.step()
        held = scheduler.kv_used + sum(point.input_tokens + point.output_tokens - 1 for _ in step.finished)
        now += model.step_time(step.scheduled, held, step.running)
        seconds_taken = model.step_time(step.scheduled, held, step.running)
        found.append(StepSample(1, step.scheduled, held, step.running, seconds_taken))
        for _ in step.finished:
            scheduler.submit(EngineRequest(str(number), point.input_tokens, point.output_tokens))
            number += 1
    return found


def seen(
    model: EngineModel,
    limits: BatchLimits,
    points: list[CalibrationPoint],
    seconds: float,
    path_s: float = 0.0,
) -> list[LoadPointObservation]:
    return [
        LoadPointObservation(
            point,
            seconds,
            steps(model, limits, point, seconds),
            closed_loop(model, limits, point, seconds, path_s),
        )
        for point in points
    ]


LOADS = [(1, 100, 1), (8, 2000, 8), (24, 5000, 24), (128, 3000, 4)]
POINT_S = 4.0


def observed_at(
    name: str, degree: int, slower: float, path_s: float = 0.0
) -> tuple[BatchLimits, EngineModel, list[LoadPointObservation]]:
    """An engine ``slower`` than its profile, observed at load points planned for it."""
    found = profile(name)
    limits, truth = found.limits(degree), found.model.at_degree(degree).faster(1.0 / slower)
    length = min(found.max_model_len, limits.kv_tokens)
    points = plan_points(truth, limits, max_model_len=length, bound=64, point_s=POINT_S)
    return limits, truth, seen(truth, limits, points, POINT_S, path_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "degree", "slower"), [("cpu-smollm2-135m", 2, 2.0), ("l4-8b", 1, 0.3), ("h100-70b", 4, 1.5)]
)
def test_known_step_times_are_recovered_by_the_fit(name: str, degree: int, slower: float) -> None:
    limits, truth, shown = observed_at(name, degree, slower, path_s=0.004)
    found = fit_model(shown, profile(name).model.at_degree(degree), limits)
    for load in LOADS:
        assert found.model.step_time(*load) == pytest.approx(truth.step_time(*load), rel=0.03)
    assert found.path_s == pytest.approx(0.004, abs=0.002)
    assert found.error.points >= 1
    assert max(found.error.step_p50, found.error.itl_p50) < 0.02
    assert found.error.ttft_p90 < 0.05
    assert found.note == ""
    assert [point.held for point in found.points] == [each.point.held for each in shown]


def test_the_all_reduce_time_at_another_degree_is_that_of_the_prior() -> None:
    limits, truth, shown = observed_at("h100-70b", 4, 1.0)
    found = fit_model(shown, truth, limits).model
    assert (found.degree, found.allreduce_a, found.allreduce_b) == (4, truth.allreduce_a, truth.allreduce_b)
    for load in LOADS:
        predicted = found.at_degree(8).step_time(*load)
        assert predicted == pytest.approx(truth.at_degree(8).step_time(*load), rel=0.02)


def test_an_all_reduce_prior_above_half_of_a_step_is_reduced() -> None:
    limits, truth, shown = observed_at("h100-70b", 4, 1.0)
    slow = msgspec.structs.replace(truth, allreduce_a=100 * truth.allreduce_a)
    found = fit_model(shown, slow, limits).model
    assert found.allreduce_a < slow.allreduce_a
    for load in LOADS:
        assert found.step_time(*load) == pytest.approx(truth.step_time(*load), rel=0.05)


def changed(
    shown: list[LoadPointObservation], change: Callable[[StepSample], StepSample], *, held: bool
) -> list[LoadPointObservation]:
    """The observations with other steps, at the points with this value of ``held``."""
    return [
        each._replace(samples=[change(sample) for sample in each.samples])
        if each.point.held is held
        else each
        for each in shown
    ]


@pytest.fixture(scope="module")
def shown() -> tuple[BatchLimits, EngineModel, list[LoadPointObservation]]:
    return observed_at("l4-8b", 1, 1.0)


def fit_of(
    shown: tuple[BatchLimits, EngineModel, list[LoadPointObservation]], points: list[LoadPointObservation]
) -> FitResult:
    limits, truth, _ = shown
    return fit_model(points, truth, limits)


def test_held_out_points_are_not_fitted(
    shown: tuple[BatchLimits, EngineModel, list[LoadPointObservation]],
) -> None:
    slowed = changed(shown[2], lambda s: msgspec.structs.replace(s, seconds=2 * s.seconds), held=True)
    found = fit_of(shown, slowed)
    assert found.model == fit_of(shown, shown[2]).model
    assert found.error.step_p50 == pytest.approx(0.5, abs=0.05)


def every_fifth(each: LoadPointObservation, seconds: Callable[[float], float]) -> LoadPointObservation:
    samples = [
        msgspec.structs.replace(sample, seconds=seconds(sample.seconds)) if i % 5 == 0 else sample
        for i, sample in enumerate(each.samples)
    ]
    return each._replace(samples=samples)


def test_the_fit_ignores_stalled_steps(
    shown: tuple[BatchLimits, EngineModel, list[LoadPointObservation]],
) -> None:
    found = fit_of(shown, [every_fifth(each, lambda usual: usual + 0.5) for each in shown[2]])
    for load in LOADS:
        assert found.model.step_time(*load) == pytest.approx(shown[1].step_time(*load), rel=0.05)


def test_the_fit_is_of_mean_durations(
    shown: tuple[BatchLimits, EngineModel, list[LoadPointObservation]],
) -> None:
    found = fit_of(shown, [every_fifth(each, lambda usual: 1.5 * usual) for each in shown[2]])
    for load in LOADS:
        assert found.model.step_time(*load) == pytest.approx(1.1 * shown[1].step_time(*load), rel=0.03)


def test_an_error_at_held_out_points_is_reported(
    shown: tuple[BatchLimits, EngineModel, list[LoadPointObservation]],
) -> None:
    slowed = [
        each._replace(latencies=[latency._replace(itl_s=2 * latency.itl_s) for latency in each.latencies])
        for each in shown[2]
    ]
    found = fit_of(shown, slowed)
    assert found.error.itl_p50 == pytest.approx(0.5, abs=0.02)
    assert "ITL p50 by 50%" in found.note
    assert "TTFT" not in found.note


def test_a_fit_with_too_few_samples_is_refused(
    shown: tuple[BatchLimits, EngineModel, list[LoadPointObservation]],
) -> None:
    with pytest.raises(PreconditionFailed, match="too few for 5 coefficients"):
        fit_of(shown, [each._replace(samples=[]) for each in shown[2]])
    with pytest.raises(PreconditionFailed, match="no request ended"):
        fit_of(shown, [each._replace(latencies=[]) for each in shown[2]])


def test_the_initial_guess_is_within_a_fifth(
    shown: tuple[BatchLimits, EngineModel, list[LoadPointObservation]],
) -> None:
    _, truth, points = shown
    samples = [sample for each in points[:4] for sample in each.samples]
    guess = initial_guess(samples, truth.faster(3.0))
    assert guess.step_time(8, 500, 8) == pytest.approx(truth.step_time(8, 500, 8), rel=0.2)
    assert initial_guess([], truth) == truth
