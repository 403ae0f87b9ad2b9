"""A comparison plays the same arrivals to each policy, and says what came of them in one shape."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping

from policy.config.deployment import Deployment
from policy.document.parse import parse
from policy.scaling.policies.registry import choose, make
from policy.scaling.view import Policy
from sim.arrival import Arrival
from sim.oracle.bounds import Bounds
from sim.results.comparison import PolicyEntry, compare
from sim.twin.record import Record
from tests.sim.records import record

DEPLOYMENT = parse(
    {
        "models": [
            {
                "name": "m",
                "engine": "sim",
                "shapes": {"small": {"gpus": 1}},
                "modes": {"multi-replica": {"shape": "small"}},
                "control": {"slo": {"ttft_p95_s": 1.0}},
            }
        ],
        "budget": {"gpus": 1},
    }
)
ARRIVALS = (Arrival(0.0, 100, 10), Arrival(2.0, 100, 10))


def contender(name: str) -> PolicyEntry:
    return PolicyEntry(name, DEPLOYMENT, {"m": make(choose("", name))})


def test_each_gets_the_same_arrivals_and_its_own_policies() -> None:
    played: list[tuple[Mapping[str, Policy], list[Arrival]]] = []

    def play(
        deployment: Deployment,
        policies: Mapping[str, Policy],
        arrivals: Iterable[Arrival],
        said: Callable[[float], None],
    ) -> Record:
        played.append((policies, list(arrivals)))
        said(600.0)
        return record(minutes=10 * len(played))

    def arrivals() -> Iterator[Arrival]:
        yield from ARRIVALS  # an iterator that is read once

    contenders = (contender("predictive"), contender("static"))
    heard: list[tuple[str, float]] = []
    kept: dict[str, Record] = {}
    found = compare(
        contenders,
        arrivals,
        play,
        trace="t.csv",
        seed=7,
        bounds=Bounds(lower_gpu_hours=0.5, achievable_gpu_hours=0.6),
        progress=lambda name, at: heard.append((name, at)),
        kept=kept.__setitem__,
    )
    assert [(policies, asked) for policies, asked in played] == [
        (each.policies, list(ARRIVALS)) for each in contenders
    ]
    assert heard == [("predictive", 600.0), ("static", 600.0)]
    assert [kept[name].ends_at for name in ("predictive", "static")] == [600.0, 1200.0]
    assert [run.pictures[0].ends_at for run in found.runs] == [600.0, 1200.0]
    assert found.objectives["m"].ttft_p95_s == 1.0
    said = found.plain()
    assert list(said) == ["trace", "seed", "oracle", "policies"]
    assert (said["trace"], said["seed"]) == ("t.csv", 7)
    assert said["oracle"] == {"lower_gpu_hours": 0.5, "achievable_gpu_hours": 0.6}
    assert list(said["policies"]) == ["predictive", "static"]
    assert said["policies"]["static"]["oracle_ratio"] == 2.0
    json.dumps(said, allow_nan=False)
