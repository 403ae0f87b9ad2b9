"""A comparison runs the same arrivals under each policy, with summaries of one structure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
import pytest

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.scaling.policies.registry import choose, make
from policy.scaling.view import Policy
from sim.arrivals import Arrival
from sim.oracle.offline_optimum import GpuHourBounds
from sim.results.run_summary import PolicyEntry, compare, summarise
from sim.simulator.run_record import RequestOutcome, RunRecord
from tests.sim.records import NAN, decision, record, requests

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


def test_each_contender_gets_the_same_arrivals_and_its_own_policies() -> None:
    played: list[tuple[Mapping[str, Policy], list[Arrival]]] = []

    def play(
        deployment: Deployment,
        policies: Mapping[str, Policy],
        arrivals: Iterable[Arrival],
        report: Callable[[float], None],
    ) -> RunRecord:
        played.append((policies, list(arrivals)))
        report(600.0)
        return record(minutes=10 * len(played))

    def arrivals() -> Iterator[Arrival]:
        yield from ARRIVALS  # an iterator that is read once

    contenders = (contender("predictive"), contender("static"))
    reports: list[tuple[str, float]] = []
    kept: dict[str, RunRecord] = {}
    found = compare(
        contenders,
        arrivals,
        play,
        trace="t.csv",
        seed=7,
        bounds=GpuHourBounds(lower_gpu_hours=0.5, achievable_gpu_hours=0.6),
        progress=lambda name, at: reports.append((name, at)),
        kept=kept.__setitem__,
    )
    assert [(policies, asked) for policies, asked in played] == [
        (each.policies, list(ARRIVALS)) for each in contenders
    ]
    assert reports == [("predictive", 600.0), ("static", 600.0)]
    assert [kept[name].ends_at for name in ("predictive", "static")] == [600.0, 1200.0]
    assert [run.pictures[0].ends_at for run in found.runs] == [600.0, 1200.0]
    assert found.objectives["m"].ttft_p95_s == 1.0
    decoded = found.plain()
    assert list(decoded) == ["trace", "seed", "oracle", "policies"]
    assert (decoded["trace"], decoded["seed"]) == ("t.csv", 7)
    assert decoded["oracle"] == {"lower_gpu_hours": 0.5, "achievable_gpu_hours": 0.6}
    assert list(decoded["policies"]) == ["predictive", "static"]
    assert decoded["policies"]["static"]["oracle_ratio"] == 2.0
    json.dumps(decoded, allow_nan=False)


MIXED = (
    RequestOutcome.SERVED,
    RequestOutcome.SERVED,
    RequestOutcome.REFUSED,
    RequestOutcome.EXPIRED,
    RequestOutcome.FAILED,
    RequestOutcome.SPILLED_OVER,
)


def test_every_outcome_is_counted_and_unanswered_requests_count_as_failed() -> None:
    table = requests(
        range(6), [0.1, 0.3, NAN, NAN, NAN, 0.2], outcome=MIXED, met=[True, False, False, False, False, True]
    )
    found = summarise(
        RunRecord(ends_at=4.0, requests={"m": table}, decisions=[(1.0, decision(1, 2, "more"))])
    )
    assert (found.requests, found.failed, found.refused, found.expired, found.spilled_over) == (6, 3, 1, 1, 1)
    assert found.attainment == pytest.approx(2 / 6)
    assert found.goodput_rps == pytest.approx(2 / 4)
    assert found.ttft_p50_s == pytest.approx(0.2) and found.e2e_p50_s == pytest.approx(0.4)
    assert found.decisions == 1


def test_all_models_are_summarised_together() -> None:
    one, other = requests([0.0, 1.0, 2.0], [0.1] * 3), requests([0.5], [0.9], met=[False])
    found = summarise(RunRecord(ends_at=3.0, requests={"one": one, "other": other}))
    assert found.requests == 4 and found.attainment == pytest.approx(0.75)
    assert found.ttft_p50_s == pytest.approx(0.1) and found.ttft_p99_s == pytest.approx(0.876)


@pytest.mark.parametrize("served", [[], [NAN, NAN]])
def test_latencies_without_served_requests_are_none(served: list[float]) -> None:
    outcome = [RequestOutcome.REFUSED] * len(served)
    table = requests(range(len(served)), served, outcome=outcome, met=[False] * len(served))
    found = summarise(RunRecord(ends_at=0.0, requests={"m": table}))
    assert found.attainment == (0.0 if served else None)
    assert (found.ttft_p50_s, found.itl_p95_s, found.e2e_p99_s, found.goodput_rps) == (None, None, None, 0.0)
    # Strict JSON: a NaN would be no number there either.
    decoded = json.loads(msgspec.json.encode(found), parse_constant=pytest.fail)
    assert decoded["ttft_p99_s"] is None
