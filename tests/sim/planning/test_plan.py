"""A plan is what trying every count would find, and what follows from it hangs together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.config.deployment import Deployment, Price
from policy.document.parse import parse
from policy.engine.model import Workload
from policy.engine.power import power_model_of
from policy.engine.profiles import shipped
from policy.errors import ConfigError
from sim.arrival import Arrival
from sim.planning.candidates import Basis, Candidate, candidates
from sim.planning.demand import Arrivals, demand_of, describe
from sim.planning.plan import fewest_of, plan
from sim.planning.result import PlanRequest
from sim.planning.trial import Trials
from sim.workload.traces.open import open_trace
from sim.workload.transforms import scale_rate, slice_trace
from tests.policy.engine.test_model_file import content
from tests.policy.engine.test_model_file import spec as calibrated


def deployment(profile: str = "a100-8b", **slo: Any) -> Deployment:
    """One model on cards, with an objective that a few replicas meet."""
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


def trials(document: Deployment, arrivals: Arrivals) -> Trials:
    return Trials(
        document,
        document.models[0],
        arrivals,
        demand_of(arrivals(1.0), "trace"),
        seed=3,
        progress=lambda what, at, ends_at: None,
    )


def generated(rps: float, lasts_s: float = 60.0) -> Arrivals:
    """The load as it is described, at any factor."""

    def arrivals(factor: float) -> Iterator[Arrival]:
        load = Workload(lam=rps * factor, input_tokens=900, output_tokens=150)
        return describe(load, 1.5, lasts_s, seed=7)

    return arrivals


def sliced_azure(path: Path, from_s: float, rate: float) -> Callable[[float], Iterator[Arrival]]:
    """Ninety seconds of the trace, at so many times its rate."""
    return lambda factor: scale_rate(slice_trace(open_trace(path), from_s, from_s + 90.0), rate=rate * factor)


def by_brute_force(tried: Trials, candidate: Candidate, most: int) -> int | None:
    """The least count that meets the objective, trying each from 1 up."""
    return next((count for count in range(1, most + 1) if tried.meets(candidate, count)), None)


@pytest.mark.slow
@pytest.mark.parametrize(("from_s", "rate"), [(0.0, 2.0), (600.0, 3.0)])
def test_on_the_azure_trace_it_is_what_brute_force_finds(azure: Path, from_s: float, rate: float) -> None:
    document = deployment()
    arrivals = sliced_azure(azure, from_s, rate)
    found = {}
    for candidate in candidates(document.models[0], ["a100", "h100"], [1, 2]):
        expected = by_brute_force(trials(document, arrivals), candidate, 24)
        assert fewest_of(trials(document, arrivals), candidate, 24) == expected
        found[candidate.name] = expected
    counts = [count for count in found.values() if count is not None]
    assert max(counts) >= 3, f"too easy a load to tell counts apart: {found}"


@pytest.mark.slow
def test_on_a_described_load_it_is_what_brute_force_finds() -> None:
    document = deployment()
    for candidate in candidates(document.models[0], ["a100"], [1, 4]):
        tried = trials(document, generated(12.0))
        expected = by_brute_force(trials(document, generated(12.0)), candidate, 20)
        assert expected is not None
        assert fewest_of(tried, candidate, 20) == expected
        assert tried.meets(candidate, expected) and (
            expected == 1 or not tried.meets(candidate, expected - 1)
        )


def test_a_kind_that_is_too_slow_for_a_request_alone_is_not_tried() -> None:
    document = deployment(itl_p95_s=0.03)
    said: list[str] = []
    arrivals = generated(5.0, 10.0)
    demand = demand_of(arrivals(1.0), "trace")
    tried = Trials(
        document,
        document.models[0],
        arrivals,
        demand,
        seed=0,
        progress=lambda what, at, ends_at: said.append(what),
    )
    (card,) = candidates(document.models[0], ["l4"], [1])
    assert fewest_of(tried, card, 1000) is None and not said


@pytest.mark.slow
def test_no_fleet_attains_more_than_requests_that_are_alone() -> None:
    document = deployment(itl_p95_s=0.0119)
    arrivals = generated(2.0, 60.0)
    (card,) = candidates(document.models[0], ["a100"], [1])
    tried = trials(document, arrivals)
    assert not tried.could(card)
    assert not tried.meets(card, 40)


@pytest.mark.slow
def test_what_a_plan_says_hangs_together() -> None:
    document = deployment()
    tried = trials(document, generated(10.0, 40.0))
    found = candidates(document.models[0], ["a100", "h100"], [1, 2])
    ask = PlanRequest(growth=(1.5, 2.0), monthly=0.1, module=4, upstream=Price(input=0.5, output=1.5))
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
    assert [each.peak_w for each in made.growth] == pytest.approx(
        [each.devices * watts for each in made.growth]
    )

    failure, power, network = made.failure, made.power, made.network
    assert failure is not None and power is not None and network is not None
    assert failure.with_spare.attainment > failure.without_spare.attainment
    assert failure.none.cut == 0 and failure.with_spare.cut > 0
    assert power.peak_w == made.growth[0].peak_w and 0 < power.mean_w < power.peak_w
    assert power.heat_btu_per_h == pytest.approx(3.412 * power.peak_w, rel=1e-3)
    assert network.streams_open > 0

    assert made.schedule[-1].devices >= made.growth[-1].devices
    shares = [each.bought.share for each in made.overflow]
    assert made.overflow[0].replicas == best.replicas and made.overflow[-1].replicas == 0
    assert all(each.bought.served_within >= made.attainment for each in made.overflow[:-1])
    assert shares == sorted(shares) and shares[-1] == 1.0
    all_bought = made.overflow[-1].bought
    tokens = 0.5 * all_bought.input_tokens_per_h + 1.5 * all_bought.output_tokens_per_h
    assert all_bought.cost_per_h == pytest.approx(tokens / 1e6)
    assert {said.partition(":")[0] for said in made.basis.values()} == {"measured", "assumed"}


@pytest.mark.slow
def test_where_prices_are_known_the_cheapest_is_best() -> None:
    document = deployment()
    found = candidates(document.models[0], ["a100", "h100"], [1])
    orders = {}
    for name, prices in {"a100": {"a100": 0.1, "h100": 9.0}, "h100": {"a100": 9.0, "h100": 0.1}}.items():
        tried = trials(document, generated(10.0, 30.0))
        made = plan(tried, found, PlanRequest(growth=(), prices=prices), load="described", seed=3)
        assert made.by_cost
        orders[name] = made.options[0].kind
    assert orders == {"a100": "a100", "h100": "h100"}
    some = plan(
        trials(document, generated(10.0, 30.0)),
        found,
        PlanRequest(growth=(), prices={"a100": 0.1}),
        load="described",
        seed=3,
    )
    assert not some.by_cost and some.options[0].cost_per_h is None


def test_candidates_are_of_the_models_size_and_fit() -> None:
    spec = deployment("h100-70b").models[0]
    found = {(each.kind, each.degree) for each in candidates(spec)}
    assert {kind for kind, _ in found} == {"h100", "h200", "a100", "l4"}
    assert ("h100", 1) not in found and ("h100", 4) in found and ("l4", 8) in found
    assert {each.basis for each in candidates(spec)} == {Basis.ASSUMED}


def test_a_profile_that_was_measured_is_said_to_be() -> None:
    spec = deployment("cpu-smollm2-135m").models[0]
    assert {(each.kind, each.device, each.basis) for each in candidates(spec)} == {
        ("cpu", "core", Basis.MEASURED)
    }


def test_a_profile_that_was_calibrated_stands_for_its_kind_at_its_degree() -> None:
    spec = calibrated(content())
    found = {each.degree: each for each in candidates(spec, ["h100"])}
    assert {degree: each.basis for degree, each in found.items()} == {
        1: Basis.ASSUMED,
        2: Basis.CALIBRATED,
        4: Basis.ASSUMED,
        8: Basis.ASSUMED,
    }
    assert "calibrated on m, shape large" in found[2].source
    assert {each.basis for each in candidates(spec, ["a100"])} == {Basis.ASSUMED}
    assert shipped(found[2].of(spec, 3), found[2].shape).limits.kv_tokens == 500_000


def test_a_simulated_engine_keeps_its_speed_on_other_devices() -> None:
    spec = deployment().models[0]
    slow = msgspec.structs.replace(spec, sim=msgspec.structs.replace(spec.sim, speed=0.5))
    (card,) = candidates(slow, ["h100"], [1])
    steps = []
    for each in (spec, slow):
        timing = shipped(card.of(each, 1), card.shape)
        assert timing.model is not None
        steps.append(timing.model.step_time(1, 100, 1))
    assert steps[1] == pytest.approx(2 * steps[0])


def test_a_kind_or_a_degree_that_there_is_not_is_refused() -> None:
    spec = deployment().models[0]
    with pytest.raises(ConfigError, match=r"--kinds: got 'b300', expected .*h100, h200, a100, l4"):
        candidates(spec, ["b300"])
    with pytest.raises(ConfigError, match=r"--shapes: got \[1\]"):
        candidates(deployment("l4-70b").models[0], ["l4"], [1])


def test_a_load_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"day\.csv: got 'no request'"):
        demand_of((), "day.csv")


def test_the_busiest_minute_is_the_one_with_most_tokens() -> None:
    calm = [Arrival(at, 10, 10) for at in range(0, 60, 2)]
    busy = [Arrival(60.0 + at, 1000, 100) for at in range(0, 60, 3)]
    demand = demand_of([*calm, *busy, Arrival(130.0, 10, 10)], "trace")
    assert demand.busiest_s == 60.0
    assert demand.peak_rps == pytest.approx(20 / 60)
    assert demand.peak_output_tokens_per_s == pytest.approx(2000 / 60)
    assert (demand.requests, demand.lasts_s) == (51, 130.0)


def test_a_described_load_has_the_means_that_were_asked_for() -> None:
    load = Workload(lam=20.0, input_tokens=900, output_tokens=150)
    demand = demand_of(describe(load, 1.0, 600.0, seed=1), "described")
    assert demand.rps == pytest.approx(20.0, rel=0.05)
    assert demand.input_tokens == pytest.approx(900, rel=0.05)
    assert demand.output_tokens == pytest.approx(150, rel=0.05)
