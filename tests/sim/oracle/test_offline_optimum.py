"""The bounds follow from the load and the capacity of a replica; an SLO that cannot be met is refused."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.errors import TargetError
from policy.scaling.policies.registry import choose, make
from policy.scaling.policies.static import Static
from sim.arrivals import Arrival
from sim.oracle.offline_optimum import bounds_of
from sim.oracle.replica_capacity import TRIALS, Trials, attained_rate
from sim.simulator.fault_scenario import NO_FAULTS
from sim.simulator.run import simulate
from sim.workload.per_model_load import ModelNames, trace_load

# One in a second for the first four minutes, four in a second after.
STEP_S, ENDS_S = 240, 480


def deployment(*, most: int = 8, sizes: dict[str, int] | None = None, **control: Any) -> Deployment:
    sizes = sizes or {"small": 1}
    return parse(
        {
            "models": [
                {
                    "name": "m",
                    "engine": "sim",
                    "sim": {"profile": "h100-8b", "speed": 0.05},
                    "shapes": {
                        name: {"gpus": gpus, "tensor_parallel": gpus, "max_in_flight": 64}
                        for name, gpus in sizes.items()
                    },
                    "modes": {
                        mode: {"shape": name, "replicas": {"min": 1, "max": 1 if "single" in mode else most}}
                        for mode, name in zip(("multi-replica", "single-large"), sizes, strict=False)
                    },
                    "control": {"assumed_start_s": 30, **control},
                }
            ]
        }
    )


def arrivals() -> Iterator[Arrival]:
    at = 0.0
    while at < ENDS_S - 0.5:
        yield Arrival(at, 200, 20)
        at += 1.0 if at < STEP_S else 0.25


def _bounds(of: Deployment, trials: Trials = TRIALS) -> tuple[float, float]:
    found = bounds_of(of, arrivals, trace_load(arrivals(), ModelNames(["m"])), NO_FAULTS, trials=trials)
    assert found.lower_gpu_hours is not None and found.achievable_gpu_hours is not None
    return found.lower_gpu_hours * 3600, found.achievable_gpu_hours * 3600


@pytest.fixture
def one_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.oracle.offline_optimum.attained_rate", lambda *_, **__: 1.0)
    monkeypatch.setattr("sim.oracle.offline_optimum.UPRATES", (1.0,))
    monkeypatch.setattr("sim.oracle.offline_optimum._Oracle._constant_s", lambda *_: math.inf)


@pytest.mark.slow
@pytest.mark.usefixtures("one_a_second")
def test_the_plan_of_whole_replicas_serves_the_load_and_the_bound_is_below_it() -> None:
    lower, achievable = _bounds(deployment(slo={"attainment": 1.0}))
    # One replica, then four, of which three were started half a minute before; not all of them at once, as
    # requests that are promised nothing but an answer may wait.
    assert achievable == pytest.approx(240 + 4 * 240 + 3 * 30, rel=0.06)
    assert 0 < lower <= achievable


@pytest.mark.slow
@pytest.mark.usefixtures("one_a_second")
def test_a_shape_of_two_gpus_with_the_capacity_of_one_costs_twice_as_much() -> None:
    one, two = _bounds(deployment()), _bounds(deployment(sizes={"large": 2}))
    assert two[1] == pytest.approx(2 * one[1])
    assert one[0] <= two[0] <= two[1]


@pytest.mark.slow
@pytest.mark.usefixtures("one_a_second")
def test_the_bound_of_several_modes_is_that_of_the_cheaper_one() -> None:
    assert _bounds(deployment(sizes={"small": 1, "large": 2}, mode={"sleep": "never"})) == pytest.approx(
        _bounds(deployment())
    )


@pytest.mark.usefixtures("one_a_second")
@pytest.mark.parametrize(("requests", "each_s"), [(1, 0.0), (114, 1.0)])
def test_the_bound_of_a_short_trace_is_below_the_cost_of_a_run(requests: int, each_s: float) -> None:
    of = deployment(most=1)
    few = [Arrival(i * each_s, 200, 20) for i in range(requests)]
    found = bounds_of(of, lambda: few, trace_load(few, ModelNames(["m"])), NO_FAULTS)
    taken = simulate(of, {"m": Static()}, few)
    assert taken.requests["m"].met.all()
    assert found.lower_gpu_hours is not None and found.lower_gpu_hours * 3600 <= taken.gpu_s


@pytest.mark.usefixtures("one_a_second")
def test_too_few_replicas_are_refused() -> None:
    with pytest.raises(TargetError, match="even at the maximum replica count"):
        _bounds(deployment(most=2))


def test_an_slo_that_no_rate_attains_is_refused() -> None:
    with pytest.raises(TargetError, match="miss the SLO at any rate, in every mode"):
        _bounds(deployment(slo={"ttft_p95_s": 0.001}), Trials(requests=50, lasts_s=1.0))


def shared(cached: float) -> list[Arrival]:
    """Prompts of eight blocks, of which that part is one of eight beginnings, at three a second."""
    rng, at, made = random.Random(1), 0.0, []  # noqa: S311 - reproducible, not secret
    kept = round(cached * 8)
    for number in range(400):
        at += rng.expovariate(3.0)
        begins = 100 * rng.randrange(1, 9)
        own = range(10_000 + 10 * number, 10_000 + 10 * number + 8 - kept)
        made.append(Arrival(at, 4100, 20, blocks=(*range(begins, begins + kept), *own)))
    return made


@pytest.mark.long
@pytest.mark.parametrize("cached", [0.0, 0.5, 1.0])
def test_no_policy_takes_less_than_the_plan_or_the_bound_however_much_is_cached(
    cached: float,
) -> None:
    of, made = deployment(most=24, slo={"ttft_p95_s": 8.0}), shared(cached)
    trials = Trials(requests=300, lasts_s=20.0)
    found = bounds_of(of, lambda: made, trace_load(made, ModelNames(["m"])), NO_FAULTS, trials=trials)
    assert found.lower_gpu_hours is not None and found.achievable_gpu_hours is not None
    assert found.lower_gpu_hours <= found.achievable_gpu_hours
    planned_s = 0.98 * 3600 * found.achievable_gpu_hours
    fewer = Static(replicas=int(planned_s / made[-1].at))
    for policy in (fewer, make(choose("policy", "predictive"))):
        run = simulate(of, {"m": policy}, made)
        assert run.gpu_s >= planned_s or np.mean(run.requests["m"].met) < 0.99


@pytest.mark.slow
def test_an_objective_lowers_the_rate_that_a_replica_attains() -> None:
    trials = Trials(requests=300, lasts_s=1.0)

    def rate(**slo: float) -> float:
        of = deployment(slo=slo) if slo else deployment()
        load = trace_load(arrivals(), ModelNames(["m"])).loads["m"]
        return attained_rate(
            of, of.models[0], "multi-replica", arrivals=arrivals, load=load, seed=1, trials=trials
        )

    free, loose, tight = rate(), rate(ttft_p95_s=20.0), rate(ttft_p95_s=3.0, itl_p95_s=0.25)
    assert 0 < tight < loose <= 1.2 * free
