"""The engine model against measured points, closed forms and laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.kv_memory import KvMemory
from policy.engine.model import (
    EngineModel,
    Limits,
    Slo,
    Workload,
    crossover_utilisation,
    feasible_rate,
    steady,
)
from policy.engine.profiles import PROFILES, profile
from policy.engine.scheduler import Request, Scheduler
from policy.errors import ConfigError

MODEL = EngineModel(o=0.002, w=0.006, c=2e-5, g=1e-7, r=1e-5, layers=32, allreduce_a=1e-5, allreduce_b=2e-8)
LIMITS = Limits(max_num_batched_tokens=2048, max_num_seqs=256, kv_tokens=400_000)
LOAD = Workload(lam=0.0, input_tokens=1000, output_tokens=150)

SLO = Slo(itl_s=0.05)
GOLDEN = {
    ("h100-8b", 1): 22.1477,
    ("h100-8b", 2): 38.9245,
    ("h100-70b", 4): 9.6929,
    ("h100-70b", 8): 15.9863,
    ("a100-8b", 1): 7.8583,
    ("sim-small", 1): 34.5667,
}

counts = st.integers(0, 10_000)
degrees = st.sampled_from([1, 2, 4, 8])


def test_a_step_is_the_formula() -> None:
    knee = (0.006**4 + (2e-5 * 300) ** 4) ** 0.25
    assert MODEL.step_time(300, 5000, 40) == pytest.approx(0.002 + knee + 5e-4 + 4e-4)


def test_degree_divides_the_shares_and_adds_all_reduce() -> None:
    knee = (0.0015**4 + (5e-6 * 300) ** 4) ** 0.25
    allreduce = 2 * 32 * (1e-5 + 2e-8 * 1.5 * 300)
    expected = 0.002 + knee + 5e-4 / 4 + 4e-4 + allreduce
    assert MODEL.at_degree(4).step_time(300, 5000, 40) == pytest.approx(expected)


@given(counts, counts, counts, counts, degrees)
def test_a_step_grows_with_everything_in_it(
    tokens: int, kv: int, running: int, more: int, degree: int
) -> None:
    model = MODEL.at_degree(degree)
    base = model.step_time(tokens, kv, running)
    assert base >= model.o + model.w / degree
    # The knee is flat where weights dominate, so there only rounding may fall.
    assert model.step_time(tokens + more, kv, running) >= base * (1 - 1e-12)
    assert base < model.step_time(tokens, kv + more + 1, running)
    assert base < model.step_time(tokens, kv, running + more + 1)


@pytest.mark.parametrize(("running", "tokens_per_s"), [(1, 15), (4, 37), (16, 55), (32, 65)])
def test_the_cpu_profile_meets_what_one_core_was_measured_at(running: int, tokens_per_s: float) -> None:
    itl = profile("cpu-smollm2-135m").model.step_time(running, 100 * running, running)
    assert running / itl == pytest.approx(tokens_per_s, rel=0.08)


def test_the_cpu_profile_meets_prefill_two_cores_and_memory() -> None:
    cpu = profile("cpu-smollm2-135m")
    assert cpu.model.prefill_s(100, 2048) == pytest.approx(0.35, rel=0.02)
    assert 1 / cpu.model.at_degree(2).step_time(1, 100, 1) == pytest.approx(20.9, rel=0.03)
    assert cpu.limits(1).kv_tokens == 23_296


def test_prefill_runs_in_chunks_beside_decodes() -> None:
    first = MODEL.step_time(100, 5000 + 90, 11)
    second = MODEL.step_time(40, 5000 + 120, 11)
    assert MODEL.prefill_s(120, 100, kv_tokens=5000, running=10) == pytest.approx(first + second)
    with pytest.raises(ValueError, match="no room"):
        MODEL.prefill_s(1, 10, running=10)


@given(st.floats(0.01, 8), st.floats(0, 0.9))
def test_the_fixed_point_is_one(lam: float, hit: float) -> None:
    load = Workload(lam=lam, input_tokens=1000, output_tokens=150, hit=hit)
    state = steady(MODEL, load, LIMITS)
    assert state is not None
    t = MODEL.step_time(state.tokens_per_step, state.kv_tokens, state.running)
    assert t == pytest.approx(state.itl_s, rel=1e-9)
    assert state.running == pytest.approx(lam * 150 * t, rel=1e-9)
    assert state.tokens_per_step == pytest.approx(state.running + lam * t * 1000 * (1 - hit), rel=1e-9)
    assert state.kv_tokens == pytest.approx(state.running * 1075, rel=1e-9)


def test_ttft_is_the_wait_and_a_step_for_each_chunk() -> None:
    load = Workload(lam=1.0, input_tokens=5000, output_tokens=10)
    state = steady(MODEL, load, LIMITS, wait_s=0.25)
    assert state is not None
    assert state.ttft_s == pytest.approx(0.25 + 3 * state.itl_s)


@pytest.mark.parametrize(
    "limits",
    [
        Limits(max_num_batched_tokens=32, max_num_seqs=256, kv_tokens=400_000),
        Limits(max_num_batched_tokens=2048, max_num_seqs=5, kv_tokens=400_000),
        Limits(max_num_batched_tokens=2048, max_num_seqs=256, kv_tokens=5000),
    ],
)
def test_each_limit_alone_makes_a_load_infeasible(limits: Limits) -> None:
    load = Workload(lam=5.0, input_tokens=1000, output_tokens=150)
    assert steady(MODEL, load, LIMITS) is not None
    assert steady(MODEL, load, limits) is None


def test_a_rate_beyond_compute_has_no_fixed_point() -> None:
    unbounded = Limits(max_num_batched_tokens=10**9, max_num_seqs=10**9, kv_tokens=10**12)
    load = Workload(lam=1 / (2e-5 * 1150) * 1.01, input_tokens=1000, output_tokens=150)
    assert steady(MODEL, load, unbounded) is None


@given(st.floats(0.009, 0.08), st.floats(0.01, 2.0), st.floats(0, 0.95))
def test_the_feasible_rate_is_the_edge(itl: float, ttft: float, hit: float) -> None:
    load = Workload(lam=0.0, input_tokens=1000, output_tokens=150, hit=hit)
    slo = Slo(itl_s=itl, ttft_s=ttft)
    mu = feasible_rate(MODEL, load, LIMITS, slo)
    assert mu > 0

    def meets(lam: float) -> bool:
        at = Workload(lam=lam, input_tokens=1000, output_tokens=150, hit=hit)
        state = steady(MODEL, at, LIMITS)
        return state is not None and state.itl_s <= itl and state.ttft_s <= ttft

    assert meets(mu)
    assert not meets(mu * 1.0001)


def test_the_feasible_rate_grows_with_the_slo_and_is_zero_for_an_impossible_one() -> None:
    rates = [feasible_rate(MODEL, LOAD, LIMITS, Slo(itl_s=itl)) for itl in (0.007, 0.01, 0.02, 0.04, 1.0)]
    assert rates[0] == 0.0
    assert rates == sorted(rates)
    assert feasible_rate(MODEL, LOAD, LIMITS, Slo(ttft_s=0.1), wait_s=0.2) == 0.0


def test_at_low_load_it_is_what_the_scheduler_does() -> None:
    """One request a second, evenly spaced: 1000 in, 150 out."""
    h100 = profile("h100-8b")
    scheduler = Scheduler(h100.model, h100.limits(1))
    at, arrived = 0.0, 0
    first: list[float] = []
    gaps: list[float] = []
    while arrived < 20 or scheduler.running:
        if not scheduler.running:
            at = max(at, float(arrived))
            scheduler.submit(Request(str(arrived), 1000, 150))
            arrived += 1
        result = scheduler.step()
        at += result.duration_s
        (gaps if result.scheduled == 1 else first).append(result.duration_s)
    load = Workload(lam=20 / at, input_tokens=1000, output_tokens=150)
    state = steady(h100.model, load, h100.limits(1))
    assert state is not None
    assert sum(gaps) / len(gaps) == pytest.approx(state.itl_s, rel=0.01)
    assert first == [pytest.approx(h100.model.prefill_s(1000, 8192))] * 20


def test_golden_feasible_rates() -> None:
    """Requests per second of 1000 in, 150 out, within 50 ms ITL: a change here changes scaling."""
    load = Workload(lam=0.0, input_tokens=1000, output_tokens=150)
    rates = {
        (name, k): feasible_rate(profile(name).model.at_degree(k), load, profile(name).limits(k), SLO)
        for name, k in GOLDEN
    }
    assert rates == pytest.approx(GOLDEN, rel=1e-3)


@pytest.mark.parametrize(("speed_up", "expected"), [(4, 0.857), (2, 0.667)])
def test_crossover_with_poisson_arrivals_and_fixed_service(speed_up: float, expected: float) -> None:
    assert crossover_utilisation(speed_up, 1.0, 0.0) == pytest.approx(expected, abs=1e-3)


@given(st.floats(1.1, 16), st.floats(0.1, 9), st.floats(0, 4))
def test_at_the_crossover_kingman_makes_both_equally_slow(speed_up: float, ca2: float, cs2: float) -> None:
    rho = crossover_utilisation(speed_up, ca2, cs2)
    wait = rho / (1 - rho) * (ca2 + cs2) / 2
    assert (1 + wait) / speed_up == pytest.approx(1.0)
    assert crossover_utilisation(speed_up, ca2 * 2, cs2) < rho


MEMORY = KvMemory(device_bytes=80e9, overhead_bytes=3e9, weights_bytes=16e9, bytes_per_token=131_072)


def test_kv_capacity_is_the_closed_form() -> None:
    assert MEMORY.mode_tokens(8, 8) == pytest.approx((8 * 69e9 - 16e9) / 131_072)
    assert MEMORY.mode_tokens(8, 1) == pytest.approx((8 * 69e9 - 8 * 16e9) / 131_072)


@given(degrees)
def test_replicas_hold_together_what_the_mode_does(degree: int) -> None:
    replicas = 8 // degree
    together = replicas * MEMORY.replica_tokens(degree)
    assert 0 <= MEMORY.mode_tokens(8, degree) - together < replicas * 17


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    assert profile("l4-8b").limits(1).kv_tokens > 0
    with pytest.raises(ConfigError, match="l4-70b fits"):
        profile("l4-70b").limits(4)
    with pytest.raises(ConfigError, match=r"one of: .*sim-small"):
        profile("b200-8b")


@pytest.mark.parametrize("shipped", PROFILES.values(), ids=PROFILES.keys())
def test_shipped_profiles_say_where_they_come_from(shipped: object) -> None:
    found = profile(getattr(shipped, "name", ""))
    assert found is shipped
    assert found.source
    assert math.isfinite(found.model.step_time(1, 1, 1))
    assert found.assumed is (found.name != "cpu-smollm2-135m")


def test_a_model_whose_step_takes_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="takes time"):
        EngineModel(o=0, w=0, c=1, g=1, r=1)


def test_a_faster_time_divides_every_step() -> None:
    model = PROFILES["h100-70b"].model.at_degree(4)
    for tokens, kv, running in [(1, 0, 1), (600, 50_000, 40), (8192, 200_000, 256)]:
        assert model.faster(5.0).step_time(tokens, kv, running) == pytest.approx(
            model.step_time(tokens, kv, running) / 5.0
        )
