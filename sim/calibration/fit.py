"""The fit of an engine model to measured load points, and its error at held-out points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from policy.engine.least_squares import fit, with_knee
from policy.engine.online_calibration import KNEES, MIN_SAMPLES, median, slowness
from policy.engine.performance_model import BatchLimits, EngineModel
from policy.engine.performance_model_file import FitErrors, MeasuredAndPredicted, PointResult
from policy.engine.step_samples import Region, StepSample
from policy.errors import PreconditionFailed
from policy.stats.quantiles import interpolated
from sim.calibration.experiment_design import CalibrationPoint, RequestLatency, closed_loop

# The largest errors on held-out points of a model that can be trusted.
MOST_ITL_ERROR = 0.10
MOST_TTFT_ERROR = 0.20
COEFFICIENTS = 5
# A step of more than this many times the usual duration is a stall.
STALL = 2.0
# The largest fraction of a step that all-reduce may take, whatever was assumed of the links.
MOST_ALLREDUCE = 0.5


class LoadPointObservation(NamedTuple):
    """The measurement of a load point over ``seconds``: engine steps, and finished requests."""

    point: CalibrationPoint
    seconds: float
    samples: Sequence[StepSample]
    latencies: Sequence[RequestLatency]

    @property
    def steps(self) -> int:
        return sum(sample.count for sample in self.samples)


class FitResult(NamedTuple):
    """``model`` is at the measured tensor-parallel degree; ``note`` is a warning, or empty."""

    model: EngineModel
    path_s: float
    error: FitErrors
    points: tuple[PointResult, ...]
    note: str


def fit_model(seen: Sequence[LoadPointObservation], prior: EngineModel, limits: BatchLimits) -> FitResult:
    """Fit the steps of all points but the held-out ones, and compare the result with the latter.

    ``prior`` is the assumed engine model. Raises :class:`policy.errors.PreconditionFailed` for too few
    samples.
    """
    model = _model([each for each in seen if not each.point.held], prior)
    path_s = _path_s(seen, model, limits)
    points = tuple(_result(each, model, limits, path_s) for each in seen)
    error = _errors(seen, points, model)
    return FitResult(model, path_s, error, points, _note(error))


def initial_guess(samples: Sequence[StepSample], prior: EngineModel) -> EngineModel:
    """A rough model from a first look, good enough to choose load points by."""
    loads = _loads(samples, prior)
    return _fit(loads, prior) if len(loads) > COEFFICIENTS else prior.faster(1.0 / slowness(prior, loads))


def _model(seen: Sequence[LoadPointObservation], prior: EngineModel) -> EngineModel:
    loads = [load for each in seen for load in _loads(each.samples, prior)]
    if len(loads) <= COEFFICIENTS:
        raise PreconditionFailed(
            f"{len(loads)} loads of the engine were seen, too few for {COEFFICIENTS} coefficients: calibrate"
            " for longer"
        )
    return _fit(loads, prior)


def _fit(loads: Sequence[StepSample], prior: EngineModel) -> EngineModel:
    """Fit the step time without all-reduce, which one degree cannot identify: there ``prior`` is used."""
    k = prior.degree
    alone = EngineModel(
        o=prior.o, w=prior.w / k, c=prior.c / k, g=prior.g / k, r=prior.r, p=prior.p, layers=prior.layers
    )
    beside = [prior.step_time(load.tokens, 0, 0) - alone.step_time(load.tokens, 0, 0) for load in loads]
    believed = min(
        [1.0, *(MOST_ALLREDUCE * load.seconds / s for load, s in zip(loads, beside, strict=True) if s)]
    )
    rest = [
        msgspec.structs.replace(load, seconds=load.seconds - believed * s)
        for load, s in zip(loads, beside, strict=True)
    ]
    near = alone.faster(1.0 / slowness(alone, rest))
    found = fit(rest, near, *(with_knee(near, knee) for knee in KNEES))
    return msgspec.structs.replace(
        found,
        w=found.w * k,
        c=found.c * k,
        g=found.g * k,
        copy=prior.copy,
        allreduce_a=believed * prior.allreduce_a,
        allreduce_b=believed * prior.allreduce_b,
        degree=k,
    )


def _loads(samples: Sequence[StepSample], prior: EngineModel) -> list[StepSample]:
    """One sample for each region of load, with the mean duration of its steps.

    Durations are skewed, and latencies are sums of them: their median would be too low. Stalls do not count.
    """
    regions: dict[Region, list[StepSample]] = {}
    for sample in samples:
        if sample.tokens > 0.0 and sample.seconds > 0.0:
            regions.setdefault(sample.region(), []).append(sample)
    known = [region for region in regions.values() if sum(each.count for each in region) >= MIN_SAMPLES]
    return [_mean(region, prior) for region in known]


def _mean(region: Sequence[StepSample], model: EngineModel) -> StepSample:
    usual = slowness(model, region)
    ratios = [(each.count, slowness(model, [each]) / usual) for each in region]
    kept = [(steps, ratio) for steps, ratio in ratios if ratio <= STALL]
    mean = sum(steps * ratio for steps, ratio in kept) / sum(steps for steps, _ in kept)
    middle = median(region, model)
    return msgspec.structs.replace(middle, seconds=middle.seconds * mean)


def _path_s(seen: Sequence[LoadPointObservation], model: EngineModel, limits: BatchLimits) -> float:
    """The round trip that a single client sees beside the engine's steps: the median over those points."""
    beside = []
    for each in seen:
        if each.point.concurrency == 1 and not each.point.held and each.latencies:
            predicted = closed_loop(model, limits, each.point, each.seconds)
            if predicted:
                beside.append(interpolated([one.ttft_s for one in each.latencies], 0.5) - predicted[0].ttft_s)
    return max(0.0, interpolated(beside, 0.5)) if beside else 0.0


def _result(
    each: LoadPointObservation, model: EngineModel, limits: BatchLimits, path_s: float
) -> PointResult:
    predicted = closed_loop(model, limits, each.point, each.seconds, path_s)
    return PointResult(
        concurrency=each.point.concurrency,
        input_tokens=each.point.input_tokens,
        output_tokens=each.point.output_tokens,
        held=each.point.held,
        seconds=round(each.seconds, 3),
        requests=len(each.latencies),
        steps=each.steps,
        itl_p50=_measure([one.itl_s for one in each.latencies], [one.itl_s for one in predicted], 0.5),
        ttft_p50=_measure([one.ttft_s for one in each.latencies], [one.ttft_s for one in predicted], 0.5),
        ttft_p90=_measure([one.ttft_s for one in each.latencies], [one.ttft_s for one in predicted], 0.9),
    )


def _errors(
    seen: Sequence[LoadPointObservation], points: Sequence[PointResult], model: EngineModel
) -> FitErrors:
    off = [
        abs(model.step_time(sample.tokens, sample.kv_tokens, sample.running) / sample.seconds - 1.0)
        for each in seen
        if each.point.held
        for sample in each.samples
        for _ in range(sample.count)
    ]
    held = [point for point in points if point.held]
    itl = [point.itl_p50.error for point in held if point.itl_p50 is not None]
    ttft = [point.ttft_p90.error for point in held if point.ttft_p90 is not None]
    if not off or not itl or not ttft:
        raise PreconditionFailed("no request ended at a load point that was held out: calibrate for longer")
    return FitErrors(
        points=len(itl),
        step_p50=interpolated(off, 0.5),
        step_p90=interpolated(off, 0.9),
        itl_p50=sum(itl) / len(itl),
        ttft_p90=sum(ttft) / len(ttft),
    )


def _note(error: FitErrors) -> str:
    limits = (("ITL p50", error.itl_p50, MOST_ITL_ERROR), ("TTFT p90", error.ttft_p90, MOST_TTFT_ERROR))
    beyond = [f"{name} by {off:.0%} (at most {most:.0%} is good)" for name, off, most in limits if off > most]
    text = f"off at load points that were held out: {', '.join(beyond)}; plan with more headroom"
    return text if beyond else ""


def _measure(live: Sequence[float], predicted: Sequence[float], part: float) -> MeasuredAndPredicted | None:
    if not live or not predicted:
        return None
    return MeasuredAndPredicted(measured=interpolated(live, part), predicted=interpolated(predicted, part))
