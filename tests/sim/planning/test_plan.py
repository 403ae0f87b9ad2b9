"""A plan has the count of a brute-force search, and its parts are consistent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.config.deployment import Deployment, ModelSpec, ProviderPrice, Shape
from policy.deployment_file.parse import parse
from policy.engine.builtin_profiles import shipped
from policy.engine.performance_model import EngineLoad
from policy.engine.power import power_model_of
from policy.errors import ConfigError
from policy.types import EngineKind
from sim.arrivals import Arrival
from sim.planning import demand as demands
from sim.planning.candidates import Basis, candidates
from sim.planning.demand import PACKET_BYTES, STREAM_BYTES, Arrivals, demand_of, describe, network
from sim.planning.fleet_size_search import DEPTH, FleetRuns, fewest
from sim.planning.plan import fewest_of, plan
from sim.planning.result import WEEKS_PER_MONTH, CapacityPlanRequest, DeviceNeed, schedule
from tests.policy.engine.test_performance_model_file import content
from tests.policy.engine.test_performance_model_file import spec as calibrated
from tests.serve.sim_driver import client_of, engine_of, spec


def deployment(profile: str = "a100-8b", **slo: Any) -> Deployment:
    objective = {"ttft_p95_s": 1.0, "itl_p95_s": 0.02, "attainment": 0.95} | slo
    model = {
        "name": "chat",
        "engine": "sim",
        "sim": {"profile": profile},
        "shapes": {"small": {"gpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 8}}},
        "control": {"slo": objective, "assumed_start_s": 20},
    }
    return parse({"models": [model]})


def trials(document: Deployment, arrivals: Arrivals, started: list[str] | None = None) -> FleetRuns:
    def progress(what: str, _at: float, _ends_at: float) -> None:
        if started is not None:
            started.append(what)

    demand = demand_of(arrivals(1.0), "trace")
    return FleetRuns(document, document.models[0], arrivals, demand, seed=3, progress=progress)


def generated(rps: float, lasts_s: float = 60.0) -> Arrivals:
    def arrivals(factor: float) -> Iterator[Arrival]:
        load = EngineLoad(lam=rps * factor, input_tokens=900, output_tokens=150)
        return describe(load, 1.5, lasts_s, seed=7)

    return arrivals


@pytest.mark.slow
def test_the_search_finds_the_same_count_as_brute_force() -> None:
    document = deployment()
    for candidate in candidates(document.models[0], ["a100", "h100"], [1, 4]):
        tried = trials(document, generated(12.0))
        each = trials(document, generated(12.0))
        expected = next(count for count in range(1, 21) if each.meets(candidate, count))
        assert fewest_of(tried, candidate, 20) == expected
        assert tried.meets(candidate, expected)
        assert expected == 1 or not tried.meets(candidate, expected - 1)


def test_a_device_too_slow_for_a_single_request_is_not_tried() -> None:
    document = deployment(itl_p95_s=0.03)
    started: list[str] = []
    (candidate,) = candidates(document.models[0], ["l4"], [1])
    assert fewest_of(trials(document, generated(5.0, 10.0), started), candidate, 1000) is None and not started


@pytest.mark.parametrize(("engine", "tokens"), [(EngineKind.VLLM, 2048), (EngineKind.SIM, 128)])
def test_a_candidate_has_the_batch_of_the_engine_that_is_deployed(engine: EngineKind, tokens: int) -> None:
    model = ModelSpec(name="m", engine=engine, profile="cpu-smollm2-135m", shapes={"s": Shape(cpus=1)})
    (candidate,) = candidates(model, ["cpu"], [1])
    assert shipped(candidate.of(model, 1), candidate.shape).limits.max_num_batched_tokens == tokens


@pytest.mark.slow
def test_no_fleet_attains_more_than_requests_without_contention() -> None:
    document = deployment(itl_p95_s=0.0119)
    arrivals = generated(2.0, 60.0)
    (candidate,) = candidates(document.models[0], ["a100"], [1])
    tried = trials(document, arrivals)
    assert not tried.could(candidate)
    assert not tried.meets(candidate, 40)


@pytest.mark.slow
def test_requests_that_fit_into_no_replica_are_not_cut_by_a_crash() -> None:
    def arrivals(factor: float) -> Iterator[Arrival]:
        for number, arrival in enumerate(generated(4.0)(factor)):
            yield arrival._replace(input_tokens=10_000_000) if number % 20 == 0 else arrival

    document = deployment()
    (candidate,) = candidates(document.models[0], ["a100"], [1])
    tried = trials(document, arrivals)
    assert tried.outage(candidate, 2, crash=False).cut == 0
    assert tried.outage(candidate, 2, crash=True).cut > 0


@pytest.mark.slow
def test_the_parts_of_a_plan_are_consistent() -> None:
    document = deployment()
    tried = trials(document, generated(10.0, 40.0))
    found = candidates(document.models[0], ["a100", "h100"], [1, 2])
    ask = CapacityPlanRequest(
        growth=(1.5, 2.0), monthly=0.1, module=4, upstream=ProviderPrice(input=0.5, output=1.5)
    )
    made = plan(tried, found, ask, load="described", seed=3)
    best = made.options[0]
    assert best.replicas is not None and best.devices == best.replicas * best.degree
    assert best.with_spare == best.devices + best.degree
    assert best.attainment is not None and best.attainment >= made.attainment
    devices = [option.devices for option in made.options if option.devices is not None]
    assert devices == sorted(devices)

    assert [each.factor for each in made.growth] == [1.0, 1.5, 2.0]
    assert made.growth[0].devices == best.with_spare
    assert made.growth[0].replicas <= made.growth[1].replicas <= made.growth[2].replicas
    watts = power_model_of(best.kind, 0.0).watts(1.0)
    assert all(each.peak_w == pytest.approx(each.devices * watts) for each in made.growth)

    failure, power, network = made.failure, made.power, made.network
    assert failure is not None and power is not None and network is not None
    assert failure.with_spare.attainment > failure.without_spare.attainment
    assert failure.none.cut == 0 and failure.with_spare.cut > 0
    assert power.peak_w == made.growth[0].peak_w and 0 < power.mean_w < power.peak_w
    assert power.heat_btu_per_h == pytest.approx(3.412 * power.peak_w, rel=1e-3)
    assert network.streams_open > 0

    assert made.schedule[-1].devices >= made.growth[-1].devices
    shares = [each.bought.share for each in made.spillover]
    assert made.spillover[0].replicas == best.replicas and made.spillover[-1].replicas == 0
    assert all(each.bought.served_within >= made.attainment for each in made.spillover[:-1])
    assert shares == sorted(shares) and shares[-1] == 1.0
    all_bought = made.spillover[-1].bought
    tokens = 0.5 * all_bought.input_tokens_per_h + 1.5 * all_bought.output_tokens_per_h
    assert all_bought.cost_per_h == pytest.approx(tokens / 1e6)
    assert {basis.partition(":")[0] for basis in made.basis.values()} == {"measured", "assumed"}


@pytest.mark.slow
def test_the_best_candidate_is_the_cheapest_if_prices_are_known() -> None:
    document = deployment()
    found = candidates(document.models[0], ["a100", "h100"], [1])
    orders = {}
    for name, prices in {"a100": {"a100": 0.1, "h100": 9.0}, "h100": {"a100": 9.0, "h100": 0.1}}.items():
        tried = trials(document, generated(10.0, 30.0))
        made = plan(tried, found, CapacityPlanRequest(growth=(), prices=prices), load="described", seed=3)
        assert made.by_cost
        orders[name] = made.options[0].kind
    assert orders == {"a100": "a100", "h100": "h100"}
    request = CapacityPlanRequest(growth=(), prices={"a100": 0.1})
    some = plan(trials(document, generated(10.0, 30.0)), found, request, load="described", seed=3)
    assert not some.by_cost and some.options[0].cost_per_h is None


def test_candidates_have_the_size_of_the_model_and_fit_it() -> None:
    spec = deployment("h100-70b").models[0]
    found = {(each.kind, each.degree) for each in candidates(spec)}
    assert {kind for kind, _ in found} == {"h100", "h200", "a100", "l4"}
    assert ("h100", 1) not in found and ("h100", 4) in found and ("l4", 8) in found
    assert {each.basis for each in candidates(spec)} == {Basis.ASSUMED}


def test_a_measured_profile_is_marked_as_measured() -> None:
    spec = deployment("cpu-smollm2-135m").models[0]
    found = {(each.kind, each.device, each.basis) for each in candidates(spec)}
    assert found == {("cpu", "core", Basis.MEASURED)}


def test_a_calibrated_profile_is_used_at_its_own_degree() -> None:
    spec = calibrated(content())
    found = {each.degree: each for each in candidates(spec, ["h100"])}
    assert sorted(found) == [1, 2, 4, 8]
    assert [degree for degree, each in found.items() if each.basis is not Basis.ASSUMED] == [2]
    assert found[2].basis is Basis.CALIBRATED
    assert "calibrated on m, shape large" in found[2].source
    assert {each.basis for each in candidates(spec, ["a100"])} == {Basis.ASSUMED}
    assert shipped(found[2].of(spec, 3), found[2].shape).limits.kv_tokens == 500_000


def test_a_simulated_engine_keeps_its_speed_on_other_devices() -> None:
    spec = deployment().models[0]
    slow = msgspec.structs.replace(spec, sim=msgspec.structs.replace(spec.sim, speed=0.5))
    (candidate,) = candidates(slow, ["h100"], [1])
    steps = []
    for each in (spec, slow):
        timing = shipped(candidate.of(each, 1), candidate.shape)
        assert timing.model is not None
        steps.append(timing.model.step_time(1, 100, 1))
    assert steps[1] == pytest.approx(2 * steps[0])


def test_an_unknown_device_kind_or_degree_is_refused() -> None:
    spec = deployment().models[0]
    with pytest.raises(ConfigError, match=r"--kinds: got 'b300', expected .*h100, h200, a100, l4"):
        candidates(spec, ["b300"])
    with pytest.raises(ConfigError, match=r"--shapes: got \[1\]"):
        candidates(deployment("l4-70b").models[0], ["l4"], [1])


def test_a_load_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"day\.csv: got 'no request'"):
        demand_of((), "day.csv")


def test_the_busiest_minute_is_the_one_with_most_tokens() -> None:
    light = [Arrival(at, 10, 10) for at in range(0, 60, 2)]
    busy = [Arrival(60.0 + at, 1000, 100) for at in range(0, 60, 3)]
    demand = demand_of([*light, *busy, Arrival(130.0, 10, 10)], "trace")
    assert demand.busiest_s == 60.0
    assert demand.peak_rps == pytest.approx(20 / 60)
    assert demand.peak_output_tokens_per_s == pytest.approx(2000 / 60)
    assert (demand.requests, demand.lasts_s) == (51, 130.0)


def test_a_generated_load_has_the_requested_means() -> None:
    load = EngineLoad(lam=20.0, input_tokens=900, output_tokens=150)
    demand = demand_of(describe(load, 1.0, 600.0, seed=1), "described")
    assert demand.rps == pytest.approx(20.0, rel=0.05)
    assert demand.input_tokens == pytest.approx(900, rel=0.05)
    assert demand.output_tokens == pytest.approx(150, rel=0.05)


@given(least=st.integers(1, 300), guess=st.integers(-5, 500), most=st.integers(1, 300))
def test_fewest_finds_the_same_count_as_trying_all(least: int, guess: int, most: int) -> None:
    expected = least if least <= most else None
    assert fewest(lambda count: count >= least, guess, most) == expected


@given(least=st.integers(1, 60), guess=st.integers(1, 100), gaps=st.sets(st.integers(1, DEPTH - 1)))
def test_a_count_that_misses_by_chance_changes_no_result(least: int, guess: int, gaps: set[int]) -> None:
    def meets(count: int) -> bool:
        return count >= least and count - least not in gaps

    assert fewest(meets, guess, 200) == least


@pytest.mark.parametrize(("guess", "most_tries"), [(40, 4), (39, 5), (1, 16), (200, 18)])
def test_a_good_guess_needs_few_trials_and_no_count_is_tried_twice(guess: int, most_tries: int) -> None:
    tries: list[int] = []

    def meets(count: int) -> bool:
        tries.append(count)
        return count >= 40

    assert fewest(meets, guess, 1000) == 40
    assert len(tries) == len(set(tries)) <= most_tries


DEMAND = demand_of([Arrival(i / 10, 1000, 200) for i in range(1200)], "even")


async def streamed(tokens: int) -> int:
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": tokens,
        "stream": True,
        "ignore_eos": True,
    }
    async with engine_of(spec()) as engine, client_of(engine) as client:
        return len((await client.post("/v1/chat/completions", json=body)).content)


async def test_an_event_has_the_bytes_that_the_engine_sends() -> None:
    short, long = await streamed(20), await streamed(220)
    each = (long - short) / 200
    assert each == pytest.approx(demands.EVENT_BYTES, abs=1.5)
    assert short - 20 * each == pytest.approx(STREAM_BYTES, abs=20)


def test_network_traffic_is_the_sum_of_requests_and_streams() -> None:
    found = network(DEMAND, "base", 4, 50)
    assert (
        found.streams == 2000 * (demands.EVENT_BYTES + demands.CHUNK_BYTES + PACKET_BYTES) + 10 * STREAM_BYTES
    )
    assert found.requests > 4 * 10_000
    assert found.each_way == found.requests + found.streams
    assert (found.replica_in, found.replica_out) == (found.requests / 4, found.streams / 4)
    assert (found.streams_open, found.events_per_s) == (50, 2000.0)


def test_a_longer_model_name_enlarges_every_event() -> None:
    short, long = (network(DEMAND, name, 4, 50).streams for name in ("base", "base" + 10 * "x"))
    assert long - short == 10 * 2000


NEEDS = (DeviceNeed(1.0, 6), DeviceNeed(2.0, 12), DeviceNeed(4.0, 24))


def test_devices_arrive_when_the_load_exceeds_the_owned_capacity() -> None:
    steps = schedule(NEEDS, growth=0.1, module=8, lead_weeks=4)
    assert [(step.modules, step.devices) for step in steps] == [(1, 8), (1, 16), (1, 24)]
    # 8 devices carry a factor of 8/6, 16 one of 16/6: here devices grow with the load.
    assert [step.factor for step in steps] == pytest.approx([1.0, 8 / 6, 16 / 6])
    for step in steps:
        assert math.pow(1.1, step.month) == pytest.approx(step.factor)
        assert step.month - step.order_month == pytest.approx(4 / WEEKS_PER_MONTH)


def test_the_first_purchase_covers_the_present_need() -> None:
    first = schedule((DeviceNeed(1.0, 20),), growth=0.1, module=8, lead_weeks=4)
    assert [(step.month, step.modules, step.devices) for step in first] == [(0.0, 3, 24)]
    assert first[0].order_month < 0


@pytest.mark.parametrize("module", [1, 3, 8, 100])
def test_the_owned_devices_always_cover_the_need(module: int) -> None:
    steps = schedule(NEEDS, growth=0.1, module=module, lead_weeks=2)
    for before, after in itertools.pairwise(steps):
        assert after.devices - before.devices == module and after.month >= before.month
        assert 6 * after.factor == pytest.approx(before.devices)
    assert steps[-1].devices >= 24
