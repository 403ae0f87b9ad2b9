"""Several policies on the same arrivals, beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from policy.config.control import SloConfig
from policy.config.deployment import Deployment
from policy.scaling.view import Policy
from sim.arrival import Arrival
from sim.oracle.bounds import Bounds
from sim.results.series import ChartData, chart_data
from sim.results.summary import Summary, summarise
from sim.twin.record import Record

# Runs one policy; the callback gets the simulated seconds as they pass.
Play = Callable[[Deployment, Mapping[str, Policy], Iterable[Arrival], Callable[[float], None]], Record]


class PolicyEntry(NamedTuple):
    """A policy of each model by its name, and the document as it would be with them."""

    name: str
    deployment: Deployment
    policies: Mapping[str, Policy]


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """One contender, and what came of it."""

    name: str
    summary: Summary
    pictures: tuple[ChartData, ...]


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """All runs on one trace; ``objectives`` by model."""

    trace: str
    seed: int
    bounds: Bounds
    objectives: Mapping[str, SloConfig]
    runs: tuple[PolicyRun, ...]

    def plain(self) -> dict[str, Any]:
        """What scripts read: no NaN, and ``None`` for a figure that there is none of."""
        return {
            "trace": self.trace,
            "seed": self.seed,
            "oracle": {
                "lower_gpu_hours": self.bounds.lower_gpu_hours,
                "achievable_gpu_hours": self.bounds.achievable_gpu_hours,
            },
            "policies": {run.name: msgspec.to_builtins(run.summary) for run in self.runs},
        }


def compare(
    contenders: Sequence[PolicyEntry],
    arrivals: Callable[[], Iterable[Arrival]],
    play: Play,
    *,
    trace: str,
    seed: int,
    bounds: Bounds,
    progress: Callable[[str, float], None] = lambda name, at: None,
    kept: Callable[[str, Record], None] = lambda name, record: None,
) -> PolicyComparison:
    """Run each of ``contenders`` on ``arrivals``, which must be the same at each call.

    ``progress`` gets how far each is in simulated seconds, ``kept`` each whole record, of which only what the
    report draws stays in memory.
    """
    runs = []
    for name, deployment, policies in contenders:
        record = play(deployment, policies, arrivals(), partial(progress, name))
        kept(name, record)
        runs.append(PolicyRun(name, summarise(record, bounds.lower_gpu_hours), chart_data(record)))
    objectives = {spec.name: spec.control.slo for spec in contenders[0].deployment.models}
    return PolicyComparison(trace, seed, bounds, objectives, tuple(runs))
