"""Calibration: the engine model of one model on one shape, fitted to the steps of its engines in production.

The last samples of each region of load are kept, so no region dominates. A region counts by its median
sample, so bursts of stalls change nothing. A change that recently seen regions share is applied to the
others. Samples of a replica that is slower than its peers are corrected for that. Coefficients are those of
the shape's own degree, as one device (:meth:`policy.engine.performance_model.EngineModel.as_one_device`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from policy.engine.least_squares import fit, with_knee
from policy.engine.performance_model import EngineModel
from policy.engine.step_samples import Region, StepSample
from policy.engine.stragglers import StepReport, reports_of, slowdown
from policy.stats.quantiles import nearest_rank

# Samples kept per region, samples needed to use a region, and regions kept.
KEPT = 9
MIN_SAMPLES = 3
REGIONS = 40
# One of HELD_EVERY samples is held out, the last HELD of them are kept. They are picked by the golden ratio:
# reports are sorted by region, so every eighth sample could be of the same region each time.
HELD_EVERY = 8
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
HELD = 64
# Samples between two fits.
FIT_EVERY = 24
# Regions, and the range of scheduled tokens over them, that identify all coefficients.
ENOUGH_REGIONS = 5
ENOUGH_RANGE = 4.0
# Starting points of the knee, in tokens: each fit tries one in turn beside the last result.
KNEES = (4.0, 16.0, 64.0, 256.0)
# Coefficients are published when they change a step time by this fraction.
NOTICEABLE = 0.05
# Regions seen within RECENT samples that changed together by the fraction SHIFTED correct the others.
RECENT = 3 * FIT_EVERY
SHIFTED = 0.15


class CalibrationFit(msgspec.Struct, frozen=True, kw_only=True):
    """The fitted ``model`` and its ``version`` (0: the prior), at degree 1.

    ``error`` and ``error_p90`` are the median and 90th percentile of the relative errors of ``held`` samples
    that were held out (0 without any). ``note`` is the reason why not all coefficients were fitted.
    """

    model: EngineModel
    version: int = 0
    error: float = 0.0
    error_p90: float = 0.0
    held: int = 0
    note: str = ""


class RegionSamples(msgspec.Struct, kw_only=True):
    """The last samples of a region, oldest first; ``seen`` counts all samples up to the newest."""

    key: Region
    samples: list[StepSample] = []
    seen: int = 0


class CalibrationState(msgspec.Struct, kw_only=True):
    """The state of a calibration, persisted over restarts.

    ``regions`` are in the order of their last sample; ``reports`` are by replica.
    """

    model: EngineModel
    version: int = 0
    note: str = ""
    seen: int = 0
    fitted: int = 0
    regions: list[RegionSamples] = msgspec.field(default_factory=list, name="places")
    held: list[StepSample] = []
    reports: dict[str, StepReport] = msgspec.field(default_factory=dict, name="told")


class Calibration:
    """Fits an engine model to step samples; deterministic."""

    def __init__(self, prior: EngineModel, state: CalibrationState | None = None) -> None:
        self._prior = prior.as_one_device()
        self.state = state or CalibrationState(model=self._prior, note="no steps were measured")

    @property
    def current(self) -> CalibrationFit:
        state = self.state
        errors = [abs(_step(state.model, sample) / sample.seconds - 1.0) for sample in state.held]
        return CalibrationFit(
            model=state.model,
            version=state.version,
            error=nearest_rank(errors, 0.5) if errors else 0.0,
            error_p90=nearest_rank(errors, 0.9) if errors else 0.0,
            held=len(errors),
            note=state.note,
        )

    @property
    def lately(self) -> list[StepSample]:
        """The samples of recently seen regions."""
        return [sample for region in self._recent() for sample in region.samples]

    def take_all(self, reports: Iterable[tuple[str, Iterable[StepSample]]]) -> bool:
        """Learn from the samples of several replicas; returns whether the model has changed.

        There is one fit, at the end: it takes the time.
        """
        for replica, samples in reports:
            self._record(replica, samples)
        state = self.state
        if state.seen - state.fitted < FIT_EVERY:
            return False
        state.fitted = state.seen
        return self._fit()

    def _record(self, replica: str, samples: Iterable[StepSample]) -> None:
        state = self.state
        valid = [each for each in samples if each.count > 0 and each.seconds > 0.0 and each.tokens > 0.0]
        reports_of(state.reports, replica, valid, state.seen)
        factor = slowdown(state.reports, replica)
        for reported in valid:
            state.seen += 1
            sample = msgspec.structs.replace(reported, seconds=reported.seconds / factor)
            if state.seen * GOLDEN % 1.0 * HELD_EVERY < 1.0:
                state.held.append(sample)
                del state.held[:-HELD]
            else:
                self._add(sample)

    def _add(self, sample: StepSample) -> None:
        regions = self.state.regions
        key = sample.region()
        index = next((i for i, region in enumerate(regions) if region.key == key), None)
        region = RegionSamples(key=key) if index is None else regions.pop(index)
        if len(regions) >= REGIONS:
            del regions[0]
        regions.append(region)
        region.samples = [*region.samples, sample][-KEPT:]
        region.seen = self.state.seen

    def _recent(self) -> list[RegionSamples]:
        return [region for region in self.state.regions if self.state.seen - region.seen <= RECENT]

    def _fit(self) -> bool:
        state = self.state
        self._shift()
        usable = [region for region in state.regions if len(region.samples) >= MIN_SAMPLES]
        if not usable:
            return False
        points = [median(region.samples, state.model) for region in usable]
        near = self._prior.faster(1.0 / slowness(self._prior, points))
        tokens = [point.tokens for point in points]
        if len(points) < ENOUGH_REGIONS or max(tokens) < ENOUGH_RANGE * min(tokens):
            found, state.note = near, "too few load points for more than one factor on what was assumed"
        else:
            knee = KNEES[state.fitted // FIT_EVERY % len(KNEES)]
            found, state.note = fit(points, near, state.model, with_knee(near, knee)), ""
        change = max(abs(_step(found, point) / _step(state.model, point) - 1.0) for point in points)
        if state.version and change < NOTICEABLE:
            return False
        state.model, state.version = found, state.version + 1
        return True

    def _shift(self) -> None:
        """Apply a change that all recently seen regions share to the other regions."""
        model = self.state.model
        usable = [region.samples for region in self._recent() if len(region.samples) >= MIN_SAMPLES]
        factor = slowness(model, [median(samples, model) for samples in usable])
        if not self.state.version or abs(math.log(factor)) < SHIFTED:
            return
        for region in self.state.regions:
            if self.state.seen - region.seen > RECENT:
                region.samples = [
                    msgspec.structs.replace(sample, seconds=sample.seconds * factor)
                    for sample in region.samples
                ]


def slowness(model: EngineModel, samples: Sequence[StepSample]) -> float:
    """The median ratio of measured to modelled step time; 1 without samples."""
    if not samples:
        return 1.0
    middle = median(samples, model)
    return middle.seconds / _step(model, middle)


def median(samples: Sequence[StepSample], model: EngineModel) -> StepSample:
    """The sample with the median ratio of measured to modelled time, weighted by count."""
    whole = sum(sample.count for sample in samples)
    passed = 0
    for sample in sorted(samples, key=lambda each: each.seconds / _step(model, each)):
        passed += sample.count
        if 2 * passed >= whole:
            return sample
    raise AssertionError("no samples")


def _step(model: EngineModel, sample: StepSample) -> float:
    return model.step_time(sample.tokens, sample.kv_tokens, sample.running)
