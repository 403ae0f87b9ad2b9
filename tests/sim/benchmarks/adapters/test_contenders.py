"""The baselines implement the policies of other systems."""

from __future__ import annotations

import random

from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import Timing
from sim.arrivals import Arrival
from sim.benchmarks.adapters.contenders import (
    CONTROL_S,
    PUSH_S,
    LeastLoadedPlacement,
    ReplicaSetup,
    ServeMultiplex,
)
from sim.simulator.engine import EngineJob, VirtualTimeEngine

PROFILE = profile("sim-small")
EQUIPMENT = ReplicaSetup(Timing(limits=PROFILE.limits(1), model=PROFILE.model), slots=2, load_s=0.5)


def asked(adapter: str) -> Arrival:
    return Arrival(0.0, 8, 2, adapter=adapter)


def test_least_loaded_chooses_a_replica_with_the_fewest_requests() -> None:
    policy = LeastLoadedPlacement(4, random.Random(1))  # noqa: S311 - chance, not secrecy
    policy.in_flight = [2, 1, 3, 1]
    assert {policy.choose(0, asked("7"), 0.0) for _ in range(50)} == {1, 3}


def multiplex() -> tuple[ServeMultiplex, list[VirtualTimeEngine]]:
    policy = ServeMultiplex(3, random.Random(1))  # noqa: S311 - chance, not secrecy
    return policy, [EQUIPMENT.engine(policy.slot_rules) for _ in range(3)]


def after(policy: ServeMultiplex, replicas: list[VirtualTimeEngine], since: float, until: float) -> None:
    due = since
    while due <= until:
        due = policy.tick(replicas, due)


def test_multiplexing_prefers_replicas_that_reported_the_model() -> None:
    policy, replicas = multiplex()
    after(policy, replicas, 0.0, 1.0)
    replicas[2].submit(EngineJob(0, 8, 2, "7"), 1.0)
    assert len({policy.choose(0, asked("7"), 1.0) for _ in range(50)}) == 3, "no replica has reported yet"
    after(policy, replicas, 1.0, 1.0 + PUSH_S + CONTROL_S)
    assert {policy.choose(0, asked("7"), 1.3) for _ in range(50)} == {2}
    assert {policy.choose(0, asked("8"), 1.3) for _ in range(50)} == {0, 1}, "the fewest models"


def test_the_replica_with_fewer_requests_is_chosen_of_two_with_the_model() -> None:
    policy, replicas = multiplex()
    for i in (0, 2):
        replicas[i].submit(EngineJob(i, 8, 2, "7"), 0.0)
    after(policy, replicas, 0.0, PUSH_S + CONTROL_S)
    policy.in_flight = [3, 0, 1]
    assert {policy.choose(0, asked("7"), 0.3) for _ in range(50)} == {2}
