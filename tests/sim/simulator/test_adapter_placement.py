"""The adapter placement in simulated time: from reports of replicas to a plan and resident adapters."""

from __future__ import annotations

import random

import pytest

from policy.adapter_placement.types import PlacementHost
from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import Timing
from policy.hashing import hash_name
from policy.scaling.policies.registry import choose, make
from sim.arrivals import Arrival
from sim.benchmarks.adapters.benchmark import (
    LOAD_S,
    PROFILE,
    AdapterTraffic,
    PlacementRunResult,
    arrivals,
    run_events,
)
from sim.benchmarks.adapters.contenders import (
    LeastLoadedPlacement,
    PlacementPolicy,
    PlannedPlacement,
    ReplicaSetup,
    ServeMultiplex,
)
from sim.simulator.adapters import SimulatedPlacement, SimulatedSlots
from sim.simulator.fault_scenario import FaultScenario
from sim.simulator.run import simulate
from sim.simulator.run_record import RunRecord

REPLICAS, SLOTS = 4, 8


def test_requested_adapters_are_resident_after_a_plan_and_one_more_heartbeat() -> None:
    placing = SimulatedPlacement(LOAD_S, hash_name)
    replicas = {name: SimulatedSlots(8) for name in ("r0", "r1")}
    for second in range(10):
        for adapter in "abc":
            replicas["r0"].submit(f"{second}{adapter}", adapter, float(second))
            replicas["r0"].abort(f"{second}{adapter}", adapter)
    for name, slots in replicas.items():
        placing.beat(name, slots, 3, 10.0)
        assert not slots.requests, "it is reported once"
    placing.replan([PlacementHost(id=name, key=hash_name(name), slots=8) for name in replicas], 10.0)
    assert {home.name for home in placing.plan.homes} == set("abc")
    assert all(slots.next(10.0) is None for slots in replicas.values())
    for name, slots in replicas.items():
        placing.beat(name, slots, 3, 10.5)
    steps = {name: slots.next(10.5) for name, slots in replicas.items()}
    first = {name: None if step is None else step[0].adapter for name, step in steps.items()}
    assert first == {name: next(iter(held), None) for name, held in placing.plan.hold.items()}
    assert set(first.values()) & set("abc")


def deployment() -> Deployment:
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": PROFILE},
        "shapes": {"small": {"cpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": REPLICAS, "max": REPLICAS}}},
        "adapters": {"slots_per_replica": SLOTS},
    }
    return parse({"models": [model]})


def simulated(requests: list[Arrival]) -> RunRecord:
    policies = {"m": make(choose("policy", "static"))}
    return simulate(deployment(), policies, requests, scenario=FaultScenario(adapter_load_s=LOAD_S))


def played(name: str, requests: list[Arrival], seed: int) -> PlacementRunResult:
    found = profile(PROFILE)
    equipment = ReplicaSetup(Timing(limits=found.limits(1), model=found.model), SLOTS, LOAD_S)
    rng = random.Random(seed)  # noqa: S311 - chance, not secrecy
    policies: dict[str, PlacementPolicy] = {
        "placement": PlannedPlacement(REPLICAS, rng, equipment),
        "least_loaded": LeastLoadedPlacement(REPLICAS, rng),
        "serve_multiplex": ServeMultiplex(REPLICAS, rng),
    }
    return run_events(policies[name], equipment, requests, REPLICAS)


def asked(requests: int, seed: int) -> list[Arrival]:
    return arrivals(
        AdapterTraffic(adapters=1000, exponent=1.0, rate=100.0, requests=requests, burst_size=1.5, seed=seed)
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_simulator_and_benchmark_have_equal_loads_and_fewer_than_baselines(seed: int) -> None:
    requests = asked(4000, seed)
    loads = simulated(requests).adapter_loads
    assert loads == pytest.approx(played("placement", requests, seed).loads, rel=0.05)
    assert loads <= 0.7 * played("least_loaded", requests, seed).loads
    assert loads <= 0.7 * played("serve_multiplex", requests, seed).loads
