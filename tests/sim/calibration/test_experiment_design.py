"""The load points of a replica: within its limits and the available time, and spread."""

from __future__ import annotations

import pytest

from policy.engine.builtin_profiles import PROFILES, profile
from policy.engine.performance_model import BatchLimits, EngineModel, MeanLatencySlo
from sim.calibration.experiment_design import (
    POINTS,
    CalibrationPoint,
    PlannedPoints,
    closed_loop,
    plan_points,
    share_time,
)


def points(
    name: str = "sim-small", degree: int = 1, point_s: float = 10.0, slo: MeanLatencySlo | None = None
) -> list[CalibrationPoint]:
    found = profile(name)
    limits = found.limits(degree)
    return plan_points(
        found.model.at_degree(degree),
        limits,
        max_model_len=min(found.max_model_len, limits.kv_tokens),
        bound=128,
        point_s=point_s,
        slo=slo or MeanLatencySlo(),
    )


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "l4-70b"])
def test_load_points_of_every_shipped_engine_are_within_its_limits(name: str) -> None:
    degree = 4 if name.endswith("70b") else 1
    found, limits = profile(name), profile(name).limits(degree)
    planned_points = points(name, degree)
    assert 6 <= len(planned_points) <= POINTS
    for point in planned_points:
        assert point.concurrency <= min(128, limits.max_num_seqs)
        assert point.concurrency * (point.input_tokens + point.output_tokens) <= limits.kv_tokens
        assert point.input_tokens + point.output_tokens <= found.max_model_len
    assert {point.held for point in planned_points} == {True, False}


def test_every_concurrency_of_a_small_batch_is_a_load_point() -> None:
    found = profile("cpu-smollm2-135m")
    limits = BatchLimits(max_num_batched_tokens=128, max_num_seqs=4, kv_tokens=20_000)
    several = plan_points(found.model, limits, max_model_len=512, bound=16, point_s=20.0)
    assert {point.concurrency for point in several if point.input_tokens == 16} == {1, 2, 3, 4}


@pytest.mark.parametrize("fewest", [3, 12, POINTS])
def test_load_points_share_the_available_time(fewest: int) -> None:
    def plan(point_s: float) -> list[CalibrationPoint]:
        return [CalibrationPoint(1, 16, 4)] * min(POINTS, fewest * (1 + (point_s > 10.0)))

    found = share_time(plan, 100.0, 0.5)
    assert found.points == plan(found.point_s)
    assert len(found.points) * (found.point_s + 0.5) <= 100.0
    # The remaining time is too short for another load point.
    count = len(found.points)
    assert count == POINTS or len(plan(100.0 / (count - 1) - 0.5)) >= count


def test_a_point_lasts_at_least_a_second() -> None:
    assert share_time(lambda point_s: [CalibrationPoint(1, 16, 4)] * POINTS, 1.0, 0.5) == PlannedPoints(
        [CalibrationPoint(1, 16, 4)] * POINTS, 1.0
    )


def test_the_lowest_and_highest_concurrency_of_each_length_are_fitted() -> None:
    found = points()
    for length in {point.input_tokens for point in found}:
        ordered = sorted(point for point in found if point.input_tokens == length)
        assert not ordered[0].held
        assert not ordered[-1].held


def test_light_and_heavy_load_points_alternate() -> None:
    clients = [point.concurrency for point in points()]
    assert clients != sorted(clients)
    assert clients.index(max(clients)) < len(clients) - 1


def test_less_time_removes_the_heaviest_load_points() -> None:
    short, long = points("cpu-smollm2-135m", point_s=2.0), points("cpu-smollm2-135m", point_s=20.0)
    assert max(p.concurrency * p.input_tokens for p in short) < max(
        p.concurrency * p.input_tokens for p in long
    )


def test_concurrent_load_points_keep_the_slo() -> None:
    model, limits = profile("sim-small").model, profile("sim-small").limits(1)
    slo = MeanLatencySlo(ttft_s=0.05, itl_s=0.004)
    found = points(slo=slo)
    assert len(found) < len(points())
    for point in found:
        if point.concurrency > 1:
            in_kv = point.concurrency * point.input_tokens
            assert model.step_time(point.concurrency, in_kv, point.concurrency) <= slo.itl_s
            assert model.prefill_s(in_kv, limits.max_num_batched_tokens) <= slo.ttft_s
    assert any(point.concurrency == 1 and point.input_tokens > 1000 for point in found)


# Every step takes a second.
CLOCK = EngineModel(o=1.0, w=0.0, c=0.0, g=0.0, r=0.0)
LIMITS = BatchLimits(max_num_batched_tokens=100, max_num_seqs=8, kv_tokens=10_000)


def test_a_single_clients_latencies_are_its_own_steps() -> None:
    found = closed_loop(CLOCK, LIMITS, CalibrationPoint(1, 50, 4), 12.0)
    assert [tuple(each) for each in found] == [(1.0, 1.0)] * 3


def test_the_ttft_of_a_chunked_prompt_is_all_its_steps() -> None:
    (found,) = closed_loop(CLOCK, LIMITS, CalibrationPoint(1, 250, 2), 4.0)
    assert found.ttft_s == 3.0


def test_network_time_is_part_of_the_ttft_and_delays_the_next_request_by_a_step() -> None:
    one = closed_loop(CLOCK, LIMITS, CalibrationPoint(1, 50, 2), 10.0, path_s=0.2)
    # 2 s and 0.2 s each; the last one ends within the load point.
    assert len(one) == 4
    assert {round(each.ttft_s, 9) for each in one} == {1.2}
    # With a second client each request first waits for the running step.
    two = closed_loop(CLOCK, LIMITS, CalibrationPoint(2, 90, 3), 20.0, path_s=0.2)
    assert [each.ttft_s for each in two[2:]] == pytest.approx([2.0] * len(two[2:]), abs=0.01)


def test_an_idle_engine_starts_with_the_first_of_simultaneous_requests() -> None:
    found = closed_loop(CLOCK, LIMITS, CalibrationPoint(2, 20, 1), 2.5)
    assert [each.ttft_s for each in found[:2]] == pytest.approx([1.0, 2.0], abs=0.01)


def test_requests_that_end_after_the_load_point_do_not_count() -> None:
    assert closed_loop(CLOCK, LIMITS, CalibrationPoint(1, 50, 4), 3.9) == []


def test_the_itl_of_an_answer_of_one_token_is_zero() -> None:
    assert {each.itl_s for each in closed_loop(CLOCK, LIMITS, CalibrationPoint(1, 50, 1), 3.0)} == {0.0}
