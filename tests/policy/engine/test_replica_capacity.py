"""Predicted latencies and capacity against the batch scheduler, and the invariants of an SLO."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.control import SloConfig
from policy.engine.batch_scheduler import BatchScheduler, EngineRequest
from policy.engine.builtin_profiles import PROFILES, profile
from policy.engine.performance_model import BatchLimits, EngineLoad, Timing
from policy.engine.replica_capacity import (
    FULL,
    ExpectedLatency,
    capability,
    idle_latency,
    latency_at,
    replicas_to_find_one_idle,
)

NOTHING = SloConfig()
# Profile, degree, input and output tokens, and limits that are not the profile's.
Case = tuple[str, int, int, int, dict[str, int]]
CASES: tuple[Case, ...] = (
    ("cpu-smollm2-135m", 1, 100, 60, {}),
    ("cpu-smollm2-135m", 2, 100, 60, {}),
    ("cpu-smollm2-135m", 1, 400, 60, {}),
    ("sim-small", 1, 500, 100, {}),
    ("sim-small", 1, 3000, 50, {}),
    ("sim-small", 1, 500, 100, {"max_num_seqs": 16}),
    ("sim-small", 1, 500, 100, {"kv_tokens": 12_000}),
    ("h100-8b", 1, 1000, 150, {}),
)
NAMES = [f"{name}-{k}-{prompt}{''.join(over)}" for name, k, prompt, _, over in CASES]


def timing(case: Case) -> Timing:
    name, degree, _, _, over = case
    found = profile(name).timing(degree)
    return msgspec.structs.replace(found, limits=msgspec.structs.replace(found.limits, **over))


def workload(case: Case, lam: float = 0.0) -> EngineLoad:
    return EngineLoad(lam=lam, input_tokens=case[2], output_tokens=case[3])


def p95(durations: list[float]) -> float:
    return sorted(durations)[int(0.95 * len(durations))]


def simulated(case: Case, lam: float, count: int) -> ExpectedLatency:
    """The latencies of ``count`` requests with Poisson arrivals, without the warm-up and the end."""
    engine, random = timing(case), Random(1)  # noqa: S311 - no secret
    assert engine.model is not None
    scheduler = BatchScheduler(engine.model, engine.limits)
    arrivals, at = [], 0.0
    for _ in range(count):
        at += random.expovariate(lam)
        arrivals.append(at)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    gaps: list[float] = []
    now, arrived = 0.0, 0
    counted = range(int(0.15 * count), int(0.95 * count))
    while len(last) < count or scheduler.running:
        if not scheduler.running and not scheduler.waiting:
            now = max(now, arrivals[arrived])
        while arrived < count and arrivals[arrived] <= now:
            scheduler.submit(EngineRequest(str(arrived), case[2], case[3]))
            arrived += 1
        result = scheduler.step()
        now += result.duration_s
        for name in result.tokens:
            request = int(name)
            if request not in first:
                first[request] = now
            elif request in counted:
                gaps.append(now - last[request])
            last[request] = now
    return ExpectedLatency(
        ttft_p95_s=p95([first[i] - arrivals[i] for i in counted]),
        itl_p95_s=p95([(last[i] - first[i]) / max(case[3] - 1, 1) for i in counted]),
        gap_p95_s=p95(gaps) if gaps else 0.0,
        met=1.0,
        utilisation=1.0,
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_predicted_latencies_match_the_scheduler(case: Case, part: float) -> None:
    lam = part * capability(timing(case), workload(case), NOTHING).mu_max
    found, predicted = simulated(case, lam, 1500), latency_at(timing(case), workload(case, lam), NOTHING)
    assert predicted.itl_p95_s == pytest.approx(found.itl_p95_s, rel=0.20)
    assert predicted.ttft_p95_s == pytest.approx(found.ttft_p95_s, rel=0.25)
    assert predicted.gap_p95_s == pytest.approx(found.gap_p95_s, rel=0.25)
    assert predicted.utilisation == pytest.approx(part)


# With answers of few tokens nearly every step has prompts, and few requests decode beside them.
SHORT_ANSWERS = (
    *(
        (name, 1, prompt, 1, 0.2)
        for name, prompt in (("sim-small", 100), ("sim-small", 500), ("h100-8b", 1000))
    ),
    ("cpu-smollm2-135m", 1, 100, 1, 0.2),
    ("h100-8b", 1, 4000, 1, 0.2),
    *(("sim-small", 1, 500, output, 0.25) for output in (2, 3)),
    ("cpu-smollm2-135m", 1, 100, 2, 0.25),
    *(("sim-small", 1, prompt, output, 0.25) for prompt, output in ((3000, 2), (8000, 2), (3000, 5))),
    ("h100-8b", 1, 20_000, 2, 0.25),
)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.2, 0.5, 0.8])
@pytest.mark.parametrize(("name", "degree", "prompt", "output", "within"), SHORT_ANSWERS)
def test_short_answers(
    name: str, degree: int, prompt: int, output: int, within: float, *, part: float
) -> None:
    case: Case = (name, degree, prompt, output, {})
    lam = part * capability(timing(case), workload(case), NOTHING).mu_max
    found, expected = simulated(case, lam, 2500), latency_at(timing(case), workload(case, lam), NOTHING)
    assert expected.ttft_p95_s == pytest.approx(found.ttft_p95_s, rel=within)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_maximum_rate_is_the_throughput_of_an_overloaded_scheduler(case: Case) -> None:
    engine, edge = timing(case), capability(timing(case), workload(case), NOTHING).mu_max
    assert engine.model is not None
    scheduler = BatchScheduler(engine.model, engine.limits)
    now, arrived, done = 0.0, 0, 0
    since, before = 0.0, 0
    while done < 1200:
        while arrived < 1.5 * edge * now + 1:
            scheduler.submit(EngineRequest(str(arrived), case[2], case[3]))
            arrived += 1
        result = scheduler.step()
        now += result.duration_s
        done += len(result.finished)
        if not before and done >= 400:
            since, before = now, done
    assert (done - before) / (now - since) == pytest.approx(edge, rel=0.1)
    beyond = latency_at(engine, workload(case, 1.01 * edge), SloConfig(itl_p95_s=100.0))
    assert (beyond.ttft_p95_s, beyond.itl_p95_s, beyond.gap_p95_s, beyond.met) == (None, None, None, 0.0)
    assert beyond.utilisation == pytest.approx(1.01)


Shape = tuple[str, int]
Load = tuple[float, float, float]
shapes = st.sampled_from([(name, 1) for name in PROFILES if name != "l4-70b" and "70b" not in name])
loads = st.tuples(st.floats(1, 10_000), st.floats(1, 2000), st.sampled_from([0.0, 0.5, 0.99]))
bounds = st.one_of(st.none(), st.floats(1e-4, 100.0))


def engine_of(shape: Shape) -> Timing:
    name, degree = shape
    return profile(name).timing(degree)


def load_of(load: Load, lam: float = 0.0) -> EngineLoad:
    prompt, output, hit = load
    return EngineLoad(lam=lam, input_tokens=prompt, output_tokens=output, hit=hit)


@given(shapes, loads, bounds, bounds)
def test_mu_is_the_highest_rate_within_the_slo(
    shape: Shape, load: Load, ttft: float | None, itl: float | None
) -> None:
    slo = SloConfig(ttft_p95_s=ttft, itl_p95_s=itl)
    able = capability(engine_of(shape), load_of(load), slo)
    assert 0.0 <= able.mu <= FULL * able.mu_max
    if not able.mu:
        # Not even 1 % of the maximum rate.
        seldom = latency_at(engine_of(shape), load_of(load, 0.01 * able.mu_max), slo)
        assert (seldom.ttft_p95_s or 0) > (ttft or math.inf) or (seldom.itl_p95_s or 0) > (itl or math.inf)
        return
    at_mu = latency_at(engine_of(shape), load_of(load, able.mu), slo)
    assert at_mu.ttft_p95_s == able.ttft_s <= (ttft or math.inf)
    assert at_mu.itl_p95_s == able.itl_s <= (itl or math.inf)
    assert at_mu.met >= 0.95**2 - 1e-3
    if able.mu < FULL * able.mu_max:
        more = latency_at(engine_of(shape), load_of(load, 1.01 * able.mu), slo)
        assert (more.ttft_p95_s or 0) > (ttft or math.inf) or (more.itl_p95_s or 0) > (itl or math.inf)


@given(shapes, loads, st.lists(st.floats(1e-3, 10.0), min_size=2, max_size=4))
def test_a_looser_slo_never_lowers_the_rate(shape: Shape, load: Load, itls: list[float]) -> None:
    rates = [capability(engine_of(shape), load_of(load), SloConfig(itl_p95_s=itl)).mu for itl in sorted(itls)]
    rates.append(capability(engine_of(shape), load_of(load), NOTHING).mu)
    for tight, loose in pairwise(rates):
        assert loose >= tight * (1 - 2e-3)


@given(shapes, loads, st.floats(1e-6, 0.98))
def test_predictions_are_finite_and_grow_with_the_rate(shape: Shape, load: Load, part: float) -> None:
    edge = capability(engine_of(shape), load_of(load), NOTHING).mu_max
    slo = SloConfig(ttft_p95_s=1.0, itl_p95_s=0.1)
    some, more = (latency_at(engine_of(shape), load_of(load, p * edge), slo) for p in (part, (1 + part) / 2))
    for predicted in (some, more):
        assert predicted.ttft_p95_s is not None
        assert predicted.itl_p95_s is not None
        assert predicted.gap_p95_s is not None
        assert 0.0 < predicted.ttft_p95_s < math.inf
        assert all((each > 0.0) == (load[1] > 1.0) for each in (predicted.itl_p95_s, predicted.gap_p95_s))
        assert max(predicted.itl_p95_s, predicted.gap_p95_s) < math.inf
        assert 0.0 <= predicted.met <= 1.0
    assert (more.itl_p95_s or 0) >= (some.itl_p95_s or 0) * 0.99


def test_a_single_request_does_not_wait() -> None:
    engine = engine_of(("h100-8b", 1))
    assert engine.model is not None
    alone = latency_at(engine, EngineLoad(lam=1e-6, input_tokens=1000, output_tokens=150), NOTHING)
    assert alone.ttft_p95_s == pytest.approx(engine.model.prefill_s(1000, 8192), rel=1e-3)
    assert alone.itl_p95_s == pytest.approx(engine.model.step_time(1, 1075, 1), rel=1e-3)


def test_the_smallest_rates_are_predicted_too() -> None:
    case = CASES[3]
    least = latency_at(timing(case), workload(case, math.ulp(0.0)), NOTHING)
    assert least.itl_p95_s == pytest.approx(latency_at(timing(case), workload(case), NOTHING).itl_p95_s)


def test_answers_of_one_token_ignore_the_itl_slo() -> None:
    """Embeddings and answers of one token have no inter-token gap."""
    case = CASES[3]
    vectors = EngineLoad(lam=0.0, input_tokens=case[2], output_tokens=1.0)
    strict = SloConfig(itl_p95_s=1e-4, ttft_p95_s=1.0)
    found = capability(timing(case), vectors, strict)
    assert found.mu == capability(timing(case), vectors, SloConfig(ttft_p95_s=1.0)).mu > 0.0
    assert found.itl_s == 0.0
    outlook = latency_at(timing(case), msgspec.structs.replace(vectors, lam=found.mu), strict)
    assert (outlook.itl_p95_s, outlook.gap_p95_s) == (0.0, 0.0)
    assert outlook.met > 0.9


def test_an_unknown_engine_gets_the_generic_model() -> None:
    unknown = Timing(limits=BatchLimits(max_num_batched_tokens=8192, max_num_seqs=256, kv_tokens=0))
    able = capability(unknown, EngineLoad(lam=0.0, input_tokens=1000, output_tokens=150), NOTHING)
    assert 5 < able.mu < 50
    assert (able.seats, able.kv_tokens) == (256, 0)


GOLDEN = {
    # Requests per second of 200 in, 100 out: without an SLO, and within 0.1 s and 15 ms.
    ("h100-8b", 1): (75.385, 64.489),
    ("l4-8b", 1): (6.1677, 0.0),
    ("sim-small", 1): (98.359, 98.359),
}


def test_golden_capabilities() -> None:
    """A change here changes scaling."""
    found = {}
    for shape in GOLDEN:
        load = EngineLoad(lam=0.0, input_tokens=200, output_tokens=100)
        slo = SloConfig(ttft_p95_s=0.1, itl_p95_s=0.015)
        found[shape] = tuple(capability(engine_of(shape), load, each).mu for each in (NOTHING, slo))
    assert found == {shape: pytest.approx(rates, rel=1e-3) for shape, rates in GOLDEN.items()}


def test_the_replicas_that_let_an_arrival_find_an_idle_one_follow_erlangs_table() -> None:
    table = {
        (0.0, 0.01): 1,
        (1.0, 0.01): 5,
        (3.0, 0.01): 8,
        (10.0, 0.01): 18,
        (10.0, 0.05): 15,
        (50.0, 0.01): 64,
    }
    assert {key: replicas_to_find_one_idle(*key) for key in table} == table


def test_a_request_on_an_idle_replica_takes_its_prompt_and_a_step_for_each_token() -> None:
    timing = engine_of(("h100-8b", 1))
    idle = idle_latency(timing, EngineLoad(lam=0.0, input_tokens=1000, output_tokens=101))
    assert timing.model is not None
    assert idle.itl_s == pytest.approx(timing.model.step_time(1, 1050, 1), rel=0.01)
    assert idle.ttft_s == pytest.approx(timing.model.prefill_s(1000, 8192), rel=0.05)
    assert idle.e2e_s == pytest.approx(idle.ttft_s + 100 * idle.itl_s)
