"""The engine model of one model on one shape, measured by its engines while they serve.

Load points are kept by region, the last few of each, so that none dominates and a region that is not
visited keeps what it knew. A region speaks by the one in the middle of its samples: a burst of stalls moves
nothing until it is the rule. What the regions seen of late agree on is assumed of the others too, as an
engine that is slowed down is slower everywhere. A replica that is slower than others at the same load is that
on its own account, and counts as if it were as fast. Coefficients are of the shape's own degree, as one
device (:func:`policy.engine.least_squares.ridge_fit`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from policy.engine.least_squares import fit, fit_scaled, ridge_fit, with_knee
from policy.engine.model import EngineModel
from policy.engine.outliers import StepReport, reports_of, slowdown
from policy.engine.step_samples import Region, StepSample, step_class
from policy.stats.quantiles import nearest_rank

# Samples of a region that are kept, and how many it needs to be used.
KEPT = 9
MIN_SAMPLES = 3
REGIONS = 40
# Of so many samples one is held out, of which the last are kept. By the golden ratio: reports are sorted, and
# by a count it would be the same region of each where they are that long, which were never fitted then.
HELD_EVERY = 8
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
HELD = 64
# Samples between two fits.
FIT_EVERY = 24
# Regions, and the range of scheduled tokens over them, that identify all coefficients.
ENOUGH_REGIONS = 5
ENOUGH_RANGE = 4.0
# Beside where the last fit ended each begins with one of these, in turn, for there may be a better one.
KNEES = (4.0, 16.0, 64.0, 256.0)
# Coefficients are published when they change a step by this part.
NOTICEABLE = 0.05
# Regions seen within so many samples that are off by this part together speak for the others.
RECENT = 3 * FIT_EVERY
SHIFTED = 0.15


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an engine: its ``model`` by ``version`` (0: the prior), at degree 1.

    ``error`` is the median of the relative errors of samples that were held out, ``error_p90`` their 90th
    percentile, over ``held`` of them; 0 where there is none. ``note`` says what kept it from a whole fit.
    """

    model: EngineModel
    version: int = 0
    error: float = 0.0
    error_p90: float = 0.0
    held: int = 0
    note: str = ""


class Place(msgspec.Struct, kw_only=True):
    """The last samples of a region, oldest first; ``seen`` counts all samples up to the newest."""

    key: Region
    samples: list[StepSample] = []
    seen: int = 0


class State(msgspec.Struct, kw_only=True):
    """All that a calibration knows, to be kept over a restart."""

    model: EngineModel
    version: int = 0
    note: str = ""
    seen: int = 0
    fitted: int = 0
    places: list[Place] = []
    held: list[StepSample] = []
    told: dict[str, StepReport] = {}


class Calibration:
    """Takes samples of steps, and says what engine they are of. The same samples make the same model."""

    def __init__(self, prior: EngineModel, state: State | None = None) -> None:
        self._prior = ridge_fit(prior)
        self.state = state or State(model=self._prior, note="no steps were measured")
        self._places = {place.key: place for place in self.state.places}

    @property
    def current(self) -> Fit:
        """The model as it is known now."""
        state = self.state
        errors = [abs(_step(state.model, sample) / sample.seconds - 1.0) for sample in state.held]
        return Fit(
            model=state.model,
            version=state.version,
            error=nearest_rank(errors, 0.5) if errors else 0.0,
            error_p90=nearest_rank(errors, 0.9) if errors else 0.0,
            held=len(errors),
            note=state.note,
        )

    @property
    def lately(self) -> list[StepSample]:
        """The samples of regions that were seen of late."""
        recent = (place for place in self.state.places if self.state.seen - place.seen <= RECENT)
        return [sample for place in recent for sample in place.samples]

    def take(self, samples: Iterable[StepSample], replica: str = "") -> bool:
        """Learn from the ``samples`` of ``replica``; returns whether the model has changed."""
        return self.take_all([(replica, samples)])

    def take_all(self, told: Iterable[tuple[str, Iterable[StepSample]]]) -> bool:
        """Learn from several replicas, with one fit at the end (the fit takes the time)."""
        for replica, samples in told:
            self._hear(replica, samples)
        state = self.state
        if state.seen - state.fitted < FIT_EVERY:
            return False
        state.fitted = state.seen
        return self._fit()

    def _hear(self, replica: str, samples: Iterable[StepSample]) -> None:
        state = self.state
        sound = [each for each in samples if each.count > 0 and each.seconds > 0.0 and each.tokens > 0.0]
        reports_of(state.told, replica, sound, state.seen)
        factor = slowdown(state.told, replica)
        for told in sound:
            state.seen += 1
            sample = msgspec.structs.replace(told, seconds=told.seconds / factor)
            if state.seen * GOLDEN % 1.0 * HELD_EVERY < 1.0:
                state.held.append(sample)
                del state.held[:-HELD]
            else:
                self._place(sample)

    def _place(self, sample: StepSample) -> None:
        key = step_class(sample.tokens, sample.kv_tokens, sample.running)
        place = self._places.pop(key, None) or Place(key=key, samples=[])
        if len(self._places) >= REGIONS:
            del self._places[next(iter(self._places))]
        # The dictionary's order is from the region that was seen longest ago to the newest.
        self._places[key] = place
        place.samples.append(sample)
        del place.samples[:-KEPT]
        place.seen = self.state.seen
        self.state.places = list(self._places.values())

    def _fit(self) -> bool:
        state = self.state
        heard = [place for place in state.places if len(place.samples) >= MIN_SAMPLES]
        if not heard:
            return False
        self._shift(heard)
        points = [median(place.samples, state.model) for place in heard]
        factor = slowness(self._prior, points)
        near = fit_scaled(self._prior, factor)
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

    def _shift(self, heard: Sequence[Place]) -> None:
        """Have regions that were not seen of late follow those that were, where these all changed."""
        recent = [place for place in heard if self.state.seen - place.seen <= RECENT]
        if not self.state.version or not recent:
            return
        factor = slowness(self.state.model, [median(place.samples, self.state.model) for place in recent])
        if abs(math.log(factor)) < SHIFTED:
            return
        for place in self.state.places:
            if self.state.seen - place.seen > RECENT:
                place.samples = [
                    msgspec.structs.replace(sample, seconds=sample.seconds * factor)
                    for sample in place.samples
                ]


def slowness(model: EngineModel, samples: Sequence[StepSample]) -> float:
    """How many times as long as ``model`` says the steps of ``samples`` took: the median; 1 of none."""
    return _median([(sample.seconds / _step(model, sample), sample.count) for sample in samples])


def median(samples: Sequence[StepSample], model: EngineModel) -> StepSample:
    """The one of ``samples`` whose time is the median, for its load."""
    whole = sum(sample.count for sample in samples)
    passed = 0
    for sample in sorted(samples, key=lambda each: each.seconds / _step(model, each)):
        passed += sample.count
        if 2 * passed >= whole:
            return sample
    raise AssertionError("no samples")


def _step(model: EngineModel, sample: StepSample) -> float:
    return model.step_time(sample.tokens, sample.kv_tokens, sample.running)


def _median(weighted: Sequence[tuple[float, int]]) -> float:
    whole = sum(count for _, count in weighted)
    passed = 0
    for value, count in sorted(weighted):
        passed += count
        if 2 * passed >= whole:
            return value
    return 1.0
