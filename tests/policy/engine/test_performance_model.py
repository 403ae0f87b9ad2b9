"""The engine model against measured points, closed forms and invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.engine.builtin_profiles import PROFILES, host_kv_tokens, profile
from policy.engine.performance_model import EngineModel, KvMemory
from policy.errors import ConfigError

MODEL = EngineModel(o=0.002, w=0.006, c=2e-5, g=1e-7, r=1e-5, layers=32, allreduce_a=1e-5, allreduce_b=2e-8)

counts = st.integers(0, 10_000)
degrees = st.sampled_from([1, 2, 4, 8])


def test_step_time_follows_the_formula() -> None:
    knee = (0.006**4 + (2e-5 * 300) ** 4) ** 0.25
    assert MODEL.step_time(300, 5000, 40) == pytest.approx(0.002 + knee + 5e-4 + 4e-4)


def test_degree_divides_the_shares_and_adds_all_reduce() -> None:
    knee = (0.0015**4 + (5e-6 * 300) ** 4) ** 0.25
    allreduce = 2 * 32 * (1e-5 + 2e-8 * 1.5 * 300)
    expected = 0.002 + knee + 5e-4 / 4 + 4e-4 + allreduce
    assert MODEL.at_degree(4).step_time(300, 5000, 40) == pytest.approx(expected)


@given(counts, counts, counts, counts, degrees)
def test_step_time_grows_with_arguments(tokens: int, kv: int, running: int, more: int, degree: int) -> None:
    model = MODEL.at_degree(degree)
    base = model.step_time(tokens, kv, running)
    assert base >= model.o + model.w / degree
    # The knee is flat where weights dominate, so there only rounding may fall.
    assert model.step_time(tokens + more, kv, running) >= base * (1 - 1e-12)
    assert base < model.step_time(tokens, kv + more + 1, running)
    assert base < model.step_time(tokens, kv, running + more + 1)


@pytest.mark.parametrize(("running", "tokens_per_s"), [(1, 15), (4, 37), (16, 55), (32, 65)])
def test_the_cpu_profile_matches_measurements_on_one_core(running: int, tokens_per_s: float) -> None:
    itl = profile("cpu-smollm2-135m").model.step_time(running, 100 * running, running)
    assert running / itl == pytest.approx(tokens_per_s, rel=0.08)


def test_the_cpu_profile_matches_measured_prefill_two_cores_and_memory() -> None:
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


MEMORY = KvMemory(device_bytes=80e9, overhead_bytes=3e9, weights_bytes=16e9, bytes_per_token=131_072)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_kv_capacity_is_the_closed_form_in_whole_blocks(degree: int) -> None:
    exact = (degree * 69e9 - 16e9) / 131_072
    assert 0 <= exact - MEMORY.replica_tokens(degree) < 17


def test_unknown_profiles_and_weights_that_do_not_fit_are_rejected() -> None:
    assert profile("l4-8b").limits(1).kv_tokens > 0
    with pytest.raises(ConfigError, match="l4-70b fits"):
        profile("l4-70b").limits(4)
    with pytest.raises(ConfigError, match=r"one of: .*sim-small"):
        profile("b200-8b")


def test_a_model_without_step_time_is_rejected() -> None:
    with pytest.raises(ValueError, match="takes time"):
        EngineModel(o=0, w=0, c=1, g=1, r=1)


def test_each_device_copies_its_share_from_host_memory() -> None:
    model = PROFILES["h100-8b"].model
    # 131,072 bytes a token over 70 % of PCIe 5.0 x16.
    assert model.copy_s(1000) == pytest.approx(1000 * 131_072 / (0.7 * 64e9))
    assert model.at_degree(4).copy_s(1000) == pytest.approx(model.copy_s(1000) / 4)
    assert model.at_degree(4).as_one_device().copy_s(1000) == pytest.approx(model.copy_s(1000) / 4)
    assert model.faster(5.0).copy_s(1000) == pytest.approx(model.copy_s(1000) / 5)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_copy_is_cheaper_than_a_prefill(name: str) -> None:
    model = PROFILES[name].model
    assert 0.0 < model.copy_s(512) < model.prefill_s(512, 512) - model.step_time(1, 0, 1)


def test_faster_divides_every_step_time() -> None:
    model = PROFILES["h100-70b"].model.at_degree(4)
    for tokens, kv, running in [(1, 0, 1), (600, 50_000, 40), (8192, 200_000, 256)]:
        assert model.faster(5.0).step_time(tokens, kv, running) == pytest.approx(
            model.step_time(tokens, kv, running) / 5.0
        )


@pytest.mark.parametrize(
    ("args", "name", "tokens"),
    [
        ({}, "h100-8b", 0),
        ({"kv_offloading_size": 1}, "h100-8b", 8192),
        ({"kv_offloading_size": 2.5}, "h100-70b", 8192),
        ({"kv_offloading_size": 1}, "sim-small", 8192),
        ({"kv_offloading_size": 1}, None, 8192),
    ],
)
def test_host_memory_holds_whole_blocks(args: dict[str, float], name: str | None, tokens: int) -> None:
    assert host_kv_tokens(args, name) == tokens
