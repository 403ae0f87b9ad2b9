"""The inputs for each mode: speed, cost and power of its replicas, and the gap of a switch."""

from __future__ import annotations

from typing import Any

import pytest

from policy.engine.builtin_profiles import profile, shipped
from policy.engine.performance_model import BatchLimits, EngineModel, Timing
from policy.engine.prefill_estimate import GENERIC
from policy.engine.step_samples import StepSample
from policy.scaling.decision_types import ModeOption
from policy.wire.controller_reports import EngineReport, GpuReport
from policy.wire.heartbeat import Heartbeat
from tests.serve.plane import Plane
from tests.serve.sim_documents import deployment, document, sim_model
from tests.serve.traffic import Traffic

SMALL = profile("sim-small")


def options(plane: Plane) -> dict[str, ModeOption]:
    (now,) = plane.controller.autoscaler.journal.read(1)
    return {option.mode: option for option in now.situation.mode_options}


def of(shape: str = "small", **over: Any) -> Timing:
    spec = deployment(sim_model(**over)).models[0]
    return shipped(spec, spec.shapes[shape])


def test_profile_follows_degree_and_speed() -> None:
    assert of().model == SMALL.model
    assert of("large").model == SMALL.model.at_degree(2)
    assert of(sim={"profile": "sim-small", "speed": 4}).model == SMALL.model.faster(4)
    assert of(profile="h100-8b", sim={"profile": "sim-small", "speed": 4}).model == profile("h100-8b").model
    assert of(profile="h200-70b").model == GENERIC.model


def test_engine_arguments_limit_concurrency() -> None:
    assert of().limits.max_num_seqs == 256
    assert of(engine_args={"max_num_seqs": 8, "max_num_batched_tokens": 64}).limits == BatchLimits(
        max_num_batched_tokens=64, max_num_seqs=8, kv_tokens=SMALL.base_limits.kv_tokens
    )
    shapes = {"large": {"cpus": 2}, "small": {"cpus": 1, "max_in_flight": 3}}
    assert of(shapes=shapes).limits.max_num_seqs == 3


@pytest.mark.parametrize(
    ("args", "limits"),
    [
        ({}, (2048, 256)),
        ({"max_num_batched_tokens": 64}, (64, 64)),
        ({"performance_mode": "throughput"}, (4096, 512)),
        ({"enable_chunked_prefill": False}, (8192, 256)),
        ({"max_model_len": 16, "max_num_seqs": 2}, (32, 2)),
    ],
)
def test_limits_follow_engine_arguments_as_in_vllm(args: dict[str, Any], limits: tuple[int, int]) -> None:
    shapes = {"large": {"cpus": 2}, "small": {"cpus": 1, "max_in_flight": 1024}}
    found = of(engine_args=args, shapes=shapes).limits
    assert (found.max_num_batched_tokens, found.max_num_seqs) == limits


async def test_reported_timing_replaces_the_profile(plane: Plane) -> None:
    await plane.ready(document(sim_model(control={"tick_s": 1})))
    (replica,) = plane.cluster.replicas.values()
    reported = Timing(limits=BatchLimits(max_num_batched_tokens=99, max_num_seqs=500, kv_tokens=777))
    plane.controller.beat(Heartbeat(replica=replica, engine=EngineReport(timing=reported)))
    await Traffic(plane).run(8, m=1.0)
    timing = options(plane)["multi-replica"].timing
    assert timing.model == SMALL.model
    assert timing.limits == reported.limits
    model = EngineModel(o=1.0, w=1.0, c=1.0, g=1.0, r=1.0)
    plane.controller.beat(
        Heartbeat(replica=replica, engine=EngineReport(timing=Timing(limits=reported.limits, model=model)))
    )
    await Traffic(plane).run(2, m=1.0)
    assert options(plane)["multi-replica"].timing.model == model
    assert options(plane)["single-large"].timing.model == SMALL.model.at_degree(2)


async def test_the_budgets_prices_and_watts_apply_until_power_is_measured(plane: Plane) -> None:
    model = sim_model(
        shapes={"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1, "cpus": 2}},
        control={"tick_s": 1},
    )
    prices = {"gpu_watts": 400, "cpu_watts": 5, "gpu_cost_per_h": 2.0, "cpu_cost_per_h": 0.1}
    traffic = await Traffic.over(plane, document(model, budget=prices), 8, m=1.0)
    found = options(plane)
    assert (found["multi-replica"].watts, found["single-large"].watts) == (410, 800)
    assert (found["multi-replica"].cost_per_h, found["single-large"].cost_per_h) == pytest.approx((2.2, 4.0))
    (replica,) = plane.cluster.replicas.values()
    for _ in range(5):
        plane.controller.beat(Heartbeat(replica=replica, gpus=GpuReport(watts=150.0)))
        await traffic.run(1)
    assert options(plane)["multi-replica"].watts == 160


async def test_draining_layer_does_not_count_for_the_new_shape(plane: Plane) -> None:
    model = sim_model(
        shapes={"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}}, control={"tick_s": 1}
    )
    await plane.ready(document(model, budget={"gpu_watts": 400}))
    (replica,) = plane.cluster.replicas.values()
    traffic = Traffic(plane)

    async def reporting() -> list[str]:
        for _ in range(8):
            plane.controller.beat(Heartbeat(replica=replica, gpus=GpuReport(watts=150.0)))
            await traffic.run(1, m=1.0)
        (now,) = plane.controller.autoscaler.journal.read(1)
        return [each.id for each in now.situation.signals.replicas]

    assert await reporting() == [replica.id]
    plane.cluster.slow = True
    plane.controller.mode("m", "single-large")
    assert await reporting() == []
    assert options(plane)["single-large"].watts == 800


@pytest.mark.parametrize(("takes", "learns"), [("cpus", False), ("gpus", True)])
async def test_steps_during_starts_on_cores_are_not_fitted(plane: Plane, takes: str, learns: bool) -> None:
    large = {takes: 2} | ({"tensor_parallel": 2} if learns else {})
    model = sim_model(shapes={"large": large, "small": {takes: 1}}, control={"tick_s": 1})
    await plane.ready(document(model, budget={"cpus": 4}))
    (replica,) = plane.cluster.replicas.values()
    plane.cluster.slow = True
    plane.controller.mode("m", "single-large")
    await plane.ticks(4)
    steps = tuple(StepSample(count=5, tokens=n, kv_tokens=n, running=n, seconds=1.0) for n in (1, 4, 16, 64))
    for _ in range(8):
        plane.controller.beat(Heartbeat(replica=replica, engine=EngineReport(steps=steps)))
        await Traffic(plane).run(2, m=1.0)
    assert (options(plane)["multi-replica"].version > 0) is learns


async def test_steps_of_a_draining_generation_are_not_fitted(plane: Plane) -> None:
    shapes = {"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}}
    control = {"tick_s": 1, "mode": {"drain_timeout_s": 600}}
    traffic = await Traffic.over(plane, document(sim_model(shapes=shapes, control=control)), 6, m=1.0)
    plane.cluster.slow = True
    plane.controller.apply(
        document(sim_model(shapes=shapes, control=control, sim={"profile": "sim-small", "speed": 2}))
    )
    await traffic.run(4)
    plane.cluster.ready()
    for second in range(40):
        for replica in tuple(plane.cluster.replicas.values()):
            steps = tuple(
                StepSample(count=5, tokens=n, kv_tokens=100.0 * n, running=n, seconds=0.01 + 0.0001 * n)
                for n in (1, 4, 16, 64, 200, 800, 1600)
            )
            plane.controller.beat(Heartbeat(replica=replica, engine=EngineReport(steps=steps)))
        await traffic.run(1)
        assert len({replica.generation for replica in plane.cluster.replicas.values()}) == 2, second
    assert options(plane)["multi-replica"].version > 0


async def test_a_switch_has_a_gap_if_the_budget_cannot_hold_both_shapes(plane: Plane) -> None:
    model = sim_model(control={"tick_s": 1, "assumed_start_s": 25})
    model["shapes"] = {"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}}
    model["modes"]["multi-replica"]["replicas"] = {"min": 1, "max": 2}
    traffic = await Traffic.over(plane, document(model, budget={"gpus": 2}), 8, m=1.0)
    assert (options(plane)["single-large"].gap_s, options(plane)["multi-replica"].gap_s) == (25.0, 0.0)
    plane.controller.apply(document(model, budget={"gpus": 3}))
    await traffic.run(2)
    assert options(plane)["single-large"].gap_s == 0.0


async def test_a_fallback_provider_enables_spillover(plane: Plane) -> None:
    upstream = {
        "name": "u", "url": "https://api.example.com/v1", "models": {"m": "theirs"},
        "price": {"input": 1, "output": 1}, "cost_cap_per_h": 1,
    }  # fmt: skip
    await Traffic.over(
        plane, document(sim_model(), upstreams=[upstream], gateway={"queue_timeout_s": 7}), 8, m=1.0
    )
    (now,) = plane.controller.autoscaler.journal.read(1)
    assert now.situation.spillover
    assert now.situation.queue_s == 7


ON_CORES = {"large": {"cpus": 2}, "small": {"cpus": 1}}
ON_GPUS = {"large": {"gpus": 2, "tensor_parallel": 2}, "small": {"gpus": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(("shapes", "measured"), [(ON_CORES, 1.0), (ON_GPUS, 3.0)], ids=["cores", "gpus"])
async def test_old_measurements_are_ignored(plane: Plane, shapes: dict[str, Any], measured: float) -> None:
    await plane.up(document(sim_model(shapes=shapes, control={"tick_s": 1})))
    traffic = Traffic(plane)
    modes = {"single-large": of("large", shapes=shapes).model, "multi-replica": of(shapes=shapes).model}
    priors = {mode: model for mode, model in modes.items() if model is not None}

    async def serve(mode: str, factor: float) -> dict[str, float]:
        for _ in range(40):
            *_, replica = plane.cluster.replicas.values()
            loads = [(n, 200.0 * n, n) for n in (1.0, 4.0, 16.0, 64.0, 200.0)]
            steps = tuple(StepSample(5, *load, priors[mode].step_time(*load) * factor) for load in loads)
            plane.controller.beat(Heartbeat(replica=replica, engine=EngineReport(steps=steps)))
            await traffic.run(1, m=1.0)
        reported = {name: option.timing.model for name, option in options(plane).items()}
        return {
            name: model.step_time(4, 800, 4) / priors[name].step_time(4, 800, 4)
            for name, model in reported.items()
            if model is not None
        }

    await plane.ticks()
    slow = pytest.approx(3.0, rel=0.1)
    assert await serve("multi-replica", 3.0) == {"single-large": slow, "multi-replica": slow}
    plane.controller.mode("m", "single-large")
    await traffic.run(10, m=1.0)
    assert await serve("single-large", 1.0) == {
        "single-large": pytest.approx(1.0, rel=0.1),
        "multi-replica": pytest.approx(measured, rel=0.1),
    }
