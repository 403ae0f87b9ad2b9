"""The engine model that is found from noisy steps, and what does and does not change it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.builtin_profiles import profile
from policy.engine.least_squares import fit
from policy.engine.online_calibration import (
    FIT_EVERY,
    MIN_SAMPLES,
    REGIONS,
    Calibration,
    CalibrationState,
    slowness,
)
from policy.engine.performance_model import EngineModel
from policy.engine.prefill_estimate import GENERIC
from policy.engine.step_samples import StepSample, pool_steps
from policy.engine.stragglers import KEPT, REPLICAS, StepReport, reports_of, slowdown
from policy.engine.stragglers import REGIONS as PACED_REGIONS

SHIPPED = {
    "cpu-1": (profile("cpu-smollm2-135m").model, 32, 128, 150),
    "cpu-2": (profile("cpu-smollm2-135m").model.at_degree(2), 32, 128, 150),
    "sim": (profile("sim-small").model, 256, 2048, 500),
    "h100": (profile("h100-8b").model, 256, 8192, 1000),
    "h100-70b-4": (profile("h100-70b").model.at_degree(4), 256, 8192, 1000),
}
CPU = SHIPPED["cpu-1"]
GENERIC_MODEL = GENERIC.model
assert GENERIC_MODEL is not None


def steps(
    truth: tuple[EngineModel, int, int, int],
    count: int,
    seed: int,
    *,
    noise: float = 0.03,
    stalls: float = 0.05,
    slower: float = 1.0,
) -> list[StepSample]:
    """Step samples of an engine under a varying load, with some stalls."""
    model, most, batch, context = truth
    random, samples = Random(seed), []  # noqa: S311 - no secret
    for _ in range(count):
        running = int(2 ** random.uniform(0, math.log2(most)))
        kv = running * context * random.uniform(0.5, 2)
        tokens = running
        if random.random() > 0.7:
            tokens = min(batch, running + int(random.uniform(0.2, 1) * batch))
        seconds = model.step_time(tokens, kv, running) * slower * random.gauss(1, noise)
        if random.random() < stalls:
            seconds *= random.uniform(3, 20)
        samples.append(StepSample(random.choice([1, 3, 8, 20]), tokens, round(kv), running, seconds))
    return samples


def learn(calibration: Calibration, samples: Iterable[StepSample], replica: str = "") -> bool:
    return calibration.take_all([(replica, samples)])


def fed(calibration: Calibration, truth: tuple[EngineModel, int, int, int], count: int, **how: float) -> None:
    for seed in range(count // 12):
        learn(calibration, steps(truth, 12, seed + int(how.get("seed", 0)), slower=how.get("slower", 1.0)))


def restarted(calibration: Calibration, prior: EngineModel) -> Calibration:
    return Calibration(
        prior, msgspec.json.decode(msgspec.json.encode(calibration.state), type=CalibrationState)
    )


def largest_error(found: EngineModel, truth: tuple[EngineModel, int, int, int], slower: float = 1.0) -> float:
    """The largest relative error over the sampled loads."""
    return max(
        abs(found.step_time(each.tokens, each.kv_tokens, each.running) / each.seconds - 1.0)
        for each in steps(truth, 200, 77, noise=0.0, stalls=0.0, slower=slower)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("start", ["as shipped", "off", "generic"])
def test_the_fit_recovers_the_engine_model(name: str, start: str) -> None:
    truth = SHIPPED[name]
    prior = truth[0].as_one_device()
    if start == "off":
        prior = msgspec.structs.replace(
            prior, o=2 * prior.o, w=0.6 * prior.w, c=1.5 * prior.c, g=0.5 * prior.g, r=2 * prior.r
        )
    elif start == "generic":
        prior = GENERIC_MODEL
    calibration = Calibration(prior)
    fed(calibration, truth, 1200)
    found = calibration.current
    assert largest_error(found.model, truth) < 0.1
    assert (found.note, found.model.degree) == ("", 1)
    assert found.version > 0 or start == "as shipped"
    # The error includes the noise of the samples, and their stalls only in the tail.
    assert 0.005 < found.error < 0.04
    assert found.error < found.error_p90 < 0.3
    assert found.model.c == pytest.approx(truth[0].as_one_device().c, rel=0.1)
    assert found.model.o + found.model.w == pytest.approx(
        truth[0].as_one_device().o + truth[0].as_one_device().w, rel=0.08
    )


@pytest.mark.slow
@given(st.lists(st.tuples(*[st.floats(0.1, 1e4)] * 3, st.floats(1e-4, 10)), min_size=1, max_size=30))
def test_coefficients_are_never_negative(loads: list[tuple[float, float, float, float]]) -> None:
    points = [StepSample(1, *load) for load in loads]
    found = fit(points, GENERIC_MODEL)
    assert min(found.o, found.w, found.c, found.g, found.r) >= 0.0
    assert found.o + found.w > 0.0
    assert all(map(math.isfinite, (found.o, found.w, found.c, found.g, found.r)))


@pytest.mark.slow
def test_a_slowdown_also_applies_to_regions_without_recent_samples() -> None:
    calibration = Calibration(CPU[0])
    fed(calibration, CPU, 600)
    light = [each for each in steps(CPU, 2000, 5, slower=2.0) if each.running < 4 and each.tokens < 16]
    for i in range(0, len(light), 12):
        learn(calibration, light[i : i + 12])
    assert len(light) > 200
    assert largest_error(calibration.current.model, CPU, slower=2.0) < 0.25


@pytest.mark.slow
def test_a_burst_of_stalls_does_not_change_the_model() -> None:
    calibration = Calibration(CPU[0])
    fed(calibration, CPU, 600)
    before = calibration.current.model
    # Half a minute in which one step in four stalls, as when other programs use the cores.
    for seed in range(10):
        learn(calibration, steps(CPU, 12, 500 + seed, stalls=0.25))
    assert largest_error(calibration.current.model, CPU) < 0.1
    assert largest_error(before, CPU) < 0.1


def both(calibration: Calibration, rounds: int, one: float, other: float, seed: int = 0) -> list[int]:
    """The versions while two replicas report in turns, each slower than the engine by a factor."""
    versions = []
    for i in range(rounds):
        reports = {"one": steps(CPU, 12, seed + 2 * i, slower=one)}
        reports["other"] = steps(CPU, 12, seed + 2 * i + 1, slower=other)
        calibration.take_all(reports.items())
        versions.append(calibration.current.version)
    return versions


@pytest.mark.slow
@pytest.mark.parametrize("start", [CPU[0], GENERIC_MODEL], ids=["as shipped", "generic"])
def test_a_slow_replica_does_not_change_the_model(start: EngineModel) -> None:
    calibration = Calibration(start)
    versions = both(calibration, 120, 1.0, 3.0)
    assert largest_error(calibration.current.model, CPU) < 0.12
    assert versions[-1] - versions[40] <= 2
    assert calibration.current.error < 0.05
    assert slowness(calibration.current.model, steps(CPU, 200, 1, slower=3.0)) == pytest.approx(3.0, rel=0.08)


@pytest.mark.slow
def test_reports_survive_a_restart_and_a_slow_replica_recovers() -> None:
    calibration = Calibration(CPU[0])
    both(calibration, 40, 1.0, 3.0)
    calibration = restarted(calibration, CPU[0])
    assert slowdown(calibration.state.reports, "other") == pytest.approx(3.0, rel=0.1)
    both(calibration, 40, 1.0, 1.0, seed=9000)
    assert slowdown(calibration.state.reports, "other") == 1.0
    assert largest_error(calibration.current.model, CPU) < 0.1


@pytest.mark.slow
def test_a_slowdown_of_all_replicas_changes_the_model() -> None:
    calibration = Calibration(CPU[0])
    both(calibration, 30, 1.0, 1.0)
    both(calibration, 40, 2.0, 2.0, seed=9000)
    assert largest_error(calibration.current.model, CPU, slower=2.0) < 0.15
    # Also of the remaining one when its peer is gone.
    for i in range(60):
        learn(calibration, steps(CPU, 12, 30_000 + i), "one")
    assert largest_error(calibration.current.model, CPU) < 0.15


@pytest.mark.slow
def test_the_fit_is_deterministic_over_restarts() -> None:
    one, other = Calibration(GENERIC_MODEL), Calibration(GENERIC_MODEL)
    for seed in range(60):
        reports = steps(CPU, 12, seed)
        assert learn(one, reports) == learn(other, reports)
        other = restarted(other, GENERIC_MODEL)
    assert one.current == other.current
    assert one.current.version > 0
    assert len(msgspec.json.encode(one.state)) < 40_000


def test_too_few_load_points_change_one_factor_with_a_note() -> None:
    calibration = Calibration(GENERIC_MODEL)
    assert calibration.current.note == "no steps were measured"
    assert (calibration.current.version, calibration.current.error) == (0, 0.0)
    for _ in range(4):
        learn(calibration, [StepSample(10, 1.0, 120.0, 1.0, 0.065)] * 12)
    found = calibration.current
    assert found.model.step_time(1, 120, 1) == pytest.approx(0.065, rel=1e-3)
    assert found.model.w / found.model.o == pytest.approx(GENERIC_MODEL.w / GENERIC_MODEL.o)
    assert (found.version, "too few" in found.note) == (1, True)
    # More of the same does not change the model.
    assert not learn(calibration, [StepSample(10, 1.0, 120.0, 1.0, 0.0652)] * 2 * FIT_EVERY)


def test_a_region_with_too_few_samples_is_not_used() -> None:
    calibration = Calibration(CPU[0])
    learn(calibration, [StepSample(1, 2.0**i, 1.0, 1.0, 5.0) for i in range(MIN_SAMPLES - 1)])
    assert calibration.current.model == CPU[0]
    assert not learn(calibration, [StepSample(0, 1.0, 1.0, 1.0, 1.0), StepSample(1, 1.0, 1.0, 1.0, 0.0)])


@pytest.mark.parametrize("length", [4, 8, 16])
def test_every_region_is_fitted_whatever_the_length_of_reports(length: int) -> None:
    """Reports are sorted by region: here only the heaviest shows that the engine is slow."""
    model = CPU[0]
    calibration = Calibration(model)
    loads = [2.0**i for i in range(length)]
    for _ in range(40):
        learn(
            calibration,
            (
                StepSample(
                    1, n, 512 * n, n, model.step_time(n, 512 * n, n) * (2.0 if n == loads[-1] else 1.0)
                )
                for n in loads
            ),
        )
    fitted = {region.key for region in calibration.state.regions}
    assert fitted == {StepSample(1, n, 512 * n, n, 1.0).region() for n in loads}
    assert len({sample.tokens for sample in calibration.state.held}) == length


def test_regions_are_bounded_and_the_least_recent_is_dropped() -> None:
    calibration = Calibration(CPU[0])
    for i in range(3 * REGIONS):
        learn(calibration, [StepSample(1, 1.0 + i % 7, 300.0 * 2.0 ** (i % 13), 2.0 ** (i % 5), 0.1)])
    assert len(calibration.state.regions) == REGIONS
    assert calibration.state.regions[-1].seen == max(region.seen for region in calibration.state.regions)


def test_as_one_device_keeps_the_step_times() -> None:
    for name, (model, *_) in SHIPPED.items():
        one = model.as_one_device()
        assert one.degree == 1
        for tokens, kv, running in ((1, 500, 1), (40, 40_000, 40), (2000, 60_000, 60)):
            assert one.step_time(tokens, kv, running) == pytest.approx(
                model.step_time(tokens, kv, running), rel=0.03
            ), name


def test_replicas_are_compared_at_the_same_load() -> None:
    reports: dict[str, StepReport] = {}
    light, heavy = StepSample(1, 4.0, 500.0, 4.0, 0.1), StepSample(1, 400.0, 50_000.0, 40.0, 3.0)
    reports_of(reports, "one", [light] * 3, 0)
    reports_of(reports, "other", [heavy] * 3, 0)
    assert (slowdown(reports, "one"), slowdown(reports, "other"), slowdown(reports, "")) == (1.0, 1.0, 1.0)
    reports_of(reports, "other", [msgspec.structs.replace(light, seconds=0.25)] * 2, 0)
    assert slowdown(reports, "other") == 1.0
    reports_of(reports, "other", [msgspec.structs.replace(light, seconds=0.25)], 0)
    assert (slowdown(reports, "one"), slowdown(reports, "other")) == (1.0, pytest.approx(2.5))
    # Of three, the median is the reference.
    reports_of(reports, "third", [msgspec.structs.replace(light, seconds=0.24)] * 3, 0)
    assert (slowdown(reports, "one"), slowdown(reports, "other")) == (pytest.approx(0.1 / 0.24), 1.0)


def test_reports_are_bounded() -> None:
    reports: dict[str, StepReport] = {}
    for i in range(3 * REPLICAS):
        reports_of(reports, f"r{i}", [StepSample(1, 2.0 ** (j // 5), 1.0, 1.0, 0.1) for j in range(200)], i)
    assert len(reports) == REPLICAS
    assert all(len(each.regions) == len(each.seconds) == PACED_REGIONS for each in reports.values())
    assert {len(seconds) for each in reports.values() for seconds in each.seconds} == {KEPT}
    # A replica that has not reported for long is dropped.
    reports_of(reports, "new", [StepSample(1, 1.0, 1.0, 1.0, 0.1)], 100_000)
    assert list(reports) == ["new"]


samples = st.builds(
    StepSample,
    st.integers(1, 50),
    st.floats(1, 8192),
    st.floats(0, 1e6),
    st.floats(1, 1024),
    st.floats(1e-4, 20),
)


@pytest.mark.slow
@given(st.lists(samples, max_size=60), st.integers(1, 20))
def test_pooling_keeps_counts_and_sums(reports: list[StepSample], most: int) -> None:
    pool = pool_steps(reports, most)
    assert len(pool) <= most
    assert sum(each.count for each in pool) == sum(each.count for each in reports)
    for name in ("tokens", "kv_tokens", "running", "seconds"):
        assert sum(getattr(each, name) * each.count for each in pool) == pytest.approx(
            sum(getattr(each, name) * each.count for each in reports)
        )


def test_a_stall_is_not_pooled_with_the_steps_around_it() -> None:
    usual, stall = StepSample(1, 4.0, 500.0, 4.0, 0.11), StepSample(1, 4.0, 504.0, 4.0, 3.0)
    pool = pool_steps([usual, stall, usual, usual], 16)
    assert [(each.count, each.seconds) for each in pool] == [(3, pytest.approx(0.11)), (1, 3.0)]
    assert usual.region() == StepSample(1, 7.0, 300.0, 5.0, 1.0).region()
    assert usual.region() != StepSample(1, 8.0, 500.0, 4.0, 1.0).region()
