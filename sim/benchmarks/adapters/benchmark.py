"""The benchmark of adapters: three policies on the same arrivals and replicas."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from policy.engine.model import Timing
from policy.engine.profiles import profile
from sim.benchmarks.adapters.contenders import (
    LeastLoaded,
    PlacementPolicy,
    PlannedPlacement,
    ReplicaSetup,
    ServeMultiplex,
)
from sim.benchmarks.adapters.event_loop import RunOutcome, run_events
from sim.workload.generators.popularity import Traffic, arrivals

# The simulated engine of a few milliseconds a step; prompts and answers are short, as classifiers' are.
PROFILE = "sim-small"
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 8
# A load of a rank-16 adapter whose files are in the page cache; the engine stands still meanwhile.
LOAD_S = 0.02


class Fleet(NamedTuple):
    """The number of replicas, and of adapter slots of each."""

    replicas: int
    slots: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of each policy, by name."""

    policies: dict[str, RunOutcome]


# Each starts from the same draw of chance.
_POLICIES: dict[str, Callable[[int, random.Random, ReplicaSetup], PlacementPolicy]] = {
    "placement": PlannedPlacement,
    "least_loaded": lambda replicas, rng, equipment: LeastLoaded(replicas, rng),
    "serve_multiplex": lambda replicas, rng, equipment: ServeMultiplex(replicas, rng),
}
NAMES = tuple(_POLICIES)


def traffic(
    *, adapters: int, exponent: float, rate: float, requests: int, together: float, seed: int
) -> Traffic:
    """The arrivals of the benchmark; see :class:`sim.workload.generators.popularity.Traffic`."""
    return Traffic(adapters, exponent, rate, requests, together, PROMPT_TOKENS, OUTPUT_TOKENS, seed)


def compare_seeds(
    asked: Traffic, fleet: Fleet, seeds: int, progress: Callable[[str, int], None] = lambda name, sent: None
) -> list[Comparison]:
    """One comparison for each of ``seeds`` seeds, from that of ``asked`` on."""
    return [compare(asked._replace(seed=asked.seed + i), fleet, progress) for i in range(seeds)]


def compare(
    asked: Traffic, fleet: Fleet, progress: Callable[[str, int], None] = lambda name, sent: None
) -> Comparison:
    """Simulate every policy on the same arrivals; ``progress`` gets a policy's name and requests sent."""
    found = profile(PROFILE)
    equipment = ReplicaSetup(Timing(limits=found.limits(1), model=found.model), fleet.slots, LOAD_S)
    requests = arrivals(asked)
    outcomes: dict[str, RunOutcome] = {}
    for name, make in _POLICIES.items():
        policy = make(fleet.replicas, random.Random(f"policy {asked.seed}"), equipment)  # noqa: S311 - chance, not secrecy

        def sent(count: int, name: str = name) -> None:
            progress(name, count)

        outcomes[name] = run_events(policy, equipment, requests, fleet.replicas, sent)
    return Comparison(policies=outcomes)
