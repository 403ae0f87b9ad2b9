"""Invariants of a run: no lost request, no event before its cause, and the same bytes for a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from policy.scaling.policies.registry import choose, make
from serve.state.desired_state import first_target
from sim.arrivals import Arrival
from sim.simulator.fault_scenario import CrashFault, FaultScenario, SlowdownFault
from sim.simulator.run import simulate
from sim.simulator.run_record import RequestOutcome, RunRecord
from store.yaml_file import read_yaml

SCENARIO = FaultScenario(
    crashes=(CrashFault(at=200.0),), slow=(SlowdownFault(at=100.0, until=300.0, factor=2.0),), spread=0.1
)


def deployment(**changes: Any) -> Deployment:
    control = {"slo": {"ttft_p95_s": 2.0, "itl_p95_s": 0.2}, "assumed_start_s": 30} | changes.pop(
        "control", {}
    )
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": "l4-8b"},
        "shapes": {"small": {"gpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 6}}},
        "control": control,
    } | changes.pop("model", {})
    return parse({"models": [model], "budget": {"gpus": 6}} | changes)


def arrivals(rate: float, lasts_s: float, seed: int = 0, output: float = 80.0) -> Iterator[Arrival]:
    rng = random.Random(seed)  # noqa: S311
    at = rng.expovariate(rate)
    while at < lasts_s:
        yield Arrival(at, int(rng.gammavariate(2, 300)) + 1, int(rng.expovariate(1 / output)) + 1)
        at += rng.expovariate(rate)


def steps(*rates: float, each_s: float = 120.0, seed: int = 0, output: float = 80.0) -> Iterator[Arrival]:
    for i, rate in enumerate(rates):
        for arrival in arrivals(rate, each_s, seed + i, output):
            yield arrival._replace(at=arrival.at + i * each_s)


def run(
    document: Deployment, trace: Iterator[Arrival], policy: object = "predictive", **more: Any
) -> RunRecord:
    made = make(choose("policy", policy))
    return simulate(document, {spec.name: made for spec in document.models}, trace, **more)


@pytest.fixture(scope="module")
def ramp() -> RunRecord:
    return run(deployment(), steps(1.0, 5.0, 1.0), scenario=SCENARIO)


@pytest.mark.slow
def test_every_request_has_one_end(ramp: RunRecord) -> None:
    came = list(steps(1.0, 5.0, 1.0))
    requests = ramp.requests["m"]
    assert len(requests) == len(came)
    assert requests.at.tolist() == [arrival.at for arrival in came]
    assert requests.output_tokens.tolist() == [arrival.output_tokens for arrival in came]
    served = requests.outcome == RequestOutcome.SERVED
    assert not served.all()  # of those on the replica that crashed some are lost
    assert set(np.unique(requests.outcome)) == {
        RequestOutcome.SERVED,
        RequestOutcome.REFUSED,
        RequestOutcome.FAILED,
    }
    assert not np.isnan(requests.e2e_s[served]).any() and np.isnan(requests.e2e_s[~served]).all()
    assert (requests.replica[served] >= 0).all()


@pytest.mark.slow
def test_no_request_has_an_event_before_its_cause(ramp: RunRecord) -> None:
    requests = ramp.requests["m"]
    served = requests.outcome == RequestOutcome.SERVED
    queued, ttft, e2e = (column[served] for column in (requests.queued_s, requests.ttft_s, requests.e2e_s))
    assert (queued >= 0).all() and (ttft > queued).all() and (e2e >= ttft).all()
    came = requests.at[served]
    for i, number in enumerate(requests.replica[served]):
        span = ramp.spans[number]
        assert span.ready_at is not None and span.ended_at is not None
        assert span.ready_at <= came[i] + queued[i]
        assert came[i] + e2e[i] <= span.ended_at + 1e-9


@pytest.mark.slow
def test_a_draining_replica_finishes_its_requests(ramp: RunRecord) -> None:
    left = [span for span in ramp.spans if span.leaves_at is not None]
    assert left
    requests = ramp.requests["m"]
    crashed = {span.number for span in ramp.spans if span.crashed}
    lost = requests.replica[requests.outcome == RequestOutcome.FAILED]
    assert crashed and set(lost.tolist()) <= crashed


@pytest.mark.slow
def test_gpu_time_counts_from_the_start_request(ramp: RunRecord) -> None:
    held = sum((span.ended_at or 0.0) - span.asked_at for span in ramp.spans)
    assert ramp.gpu_s == pytest.approx(held)
    # An L4 and its share of a server draw 76 W idle and 132 W under load.
    assert 76.0 * held < ramp.joules < 132.0 * held
    assert all(
        0.0 < span.busy_s <= (span.ended_at or 0.0) - span.asked_at for span in ramp.spans if span.tokens
    )
    at = np.arange(0.0, ramp.ends_at, 1.0)
    held_at = sum((at >= span.asked_at) & (at < (span.ended_at or 0.0)) for span in ramp.spans)
    assert held_at.max() <= 6  # the budget


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(ramp: RunRecord) -> None:
    again = run(deployment(), steps(1.0, 5.0, 1.0), scenario=SCENARIO)
    for name in ("ttft_s", "e2e_s", "replica", "outcome"):
        first, second = (getattr(record.requests["m"], name).tobytes() for record in (ramp, again))
        assert first == second
    assert repr(again.decisions) == repr(ramp.decisions)
    other = run(deployment(), steps(1.0, 5.0, 1.0), scenario=SCENARIO, seed=1)
    assert other.spans[-1] != ramp.spans[-1]


@pytest.mark.slow
def test_queued_requests_are_served_in_the_order_of_arrival() -> None:
    one = deployment(
        model={"shapes": {"small": {"gpus": 1, "max_in_flight": 4}}},
        gateway={"queue_timeout_s": 600},
        control={"slo": {}},
    )
    trace = (Arrival(i * 0.05, 200, 20) for i in range(200))
    requests = run(one, trace, {"static": {"replicas": 1}}).requests["m"]
    assert (requests.outcome == RequestOutcome.SERVED).all() and requests.queued_s.max() > 5.0
    sent = requests.at + requests.queued_s
    assert (np.diff(sent) >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("ticks_s", [(0.5,), (30.0,), (30.0, 5.0)], ids=str)
def test_samples_have_the_rate_since_the_last_one(ticks_s: tuple[float, ...]) -> None:
    """Models that share a budget are sampled together, and none more often than gateways report."""
    models = [
        {
            "name": f"m{tick_s:g}",
            "engine": "sim",
            "sim": {"profile": "l4-8b"},
            "shapes": {"small": {"gpus": 1}},
            "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 1, "max": 2}}},
            "control": {"slo": {"ttft_p95_s": 2.0}, "tick_s": tick_s},
        }
        for tick_s in ticks_s
    ]
    document = parse({"models": models, "budget": {"gpus": 4}})
    names = [spec.name for spec in document.models]
    came = [Arrival(0.5 + i, 100, 10, model=name) for i in range(120) for name in names]
    record = run(document, iter(came), "static")
    for name in names:
        rates = [moment.arrivals for moment in record.moments if moment.model == name]
        assert rates[:20] == pytest.approx([1.0] * len(rates[:20]))


@pytest.mark.slow
def test_replicas_scale_up_and_down_with_the_load() -> None:
    record = run(deployment(), steps(0.5, 6.0, 0.5, each_s=300.0))
    counts = [moment.ready for moment in record.moments]
    assert counts[5] == 1 and max(counts) >= 4 and counts[-1] < max(counts)
    first = next(span for span in record.spans if span.asked_at > 0)
    assert first.ready_at == pytest.approx(first.asked_at + 30.0)


def test_overlapping_slowdowns_multiply() -> None:
    slow = (
        SlowdownFault(at=10.0, until=50.0, factor=2.0),
        SlowdownFault(at=20.0, until=30.0, factor=3.0),
        SlowdownFault(at=40.0, until=60.0, factor=0.5),
        SlowdownFault(at=60.0, until=70.0, factor=4.0),
    )
    # One request at a time, in the middle of every ten seconds.
    trace = [Arrival(at, 100, 5) for at in np.arange(5.0, 85.0, 10.0).tolist()]
    took = run(deployment(), iter(trace), "static", scenario=FaultScenario(slow=slow)).requests["m"].e2e_s
    assert took / took[0] == pytest.approx([1.0, 2.0, 6.0, 2.0, 1.0, 0.5, 4.0, 1.0])


@pytest.mark.parametrize(
    ("policy", "least", "healthy", "begins"),
    [
        ("static", 1, 1, 1),
        ("static", 2, 1, 2),
        ("static", 0, 1, 1),
        ("static", 1, 2, 2),
        ({"static": {"replicas": 3}}, 1, 1, 3),
        ({"static": {"replicas": 9}}, 1, 1, 6),
        ("predictive", 1, 1, 6),
    ],
)
def test_a_policy_starts_with_the_replica_count_of_production(
    policy: object, least: int, healthy: int, begins: int
) -> None:
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": least, "max": 6}}}
    scale = {"min_healthy": healthy} | ({} if least else {"zero_after_s": 60})
    record = run(deployment(model={"modes": modes}, control={"scale": scale}), arrivals(20.0, 6.0), policy)
    assert sum(span.asked_at == 0.0 for span in record.spans) == begins
    if policy != "predictive":
        assert {moment.wanted for moment in record.moments} == {begins}


def test_the_shipped_document_runs_the_live_replica_count() -> None:
    document = parse(read_yaml(Path(__file__).parents[3] / "deployments" / "sim.yaml", "models"))
    (spec,) = document.models
    policies = {spec.name: make(choose("policy", spec.control.policy))}
    record = simulate(document, policies, arrivals(20.0, 6.0))
    live = first_target(spec, (), 0.0).aim.count
    assert [span.shape for span in record.spans] == ["small"] * live


@pytest.mark.slow
def test_a_request_starts_a_model_at_zero_replicas() -> None:
    modes = {"multi-replica": {"shape": "small", "replicas": {"min": 0, "max": 6}}}
    document = deployment(
        model={"modes": modes}, control={"scale": {"zero_after_s": 60}}, gateway={"queue_timeout_s": 120}
    )
    record = run(document, iter([Arrival(5.0, 100, 10), Arrival(400.0, 100, 10)]))
    requests = record.requests["m"]
    assert (requests.outcome == RequestOutcome.SERVED).all()
    assert any(moment.ready == 0 and moment.wanted == 0 for moment in record.moments)
    assert requests.ttft_s[1] > 30.0  # it waited for a start


@pytest.mark.long
def test_a_ladder_of_three_modes_is_climbed_up_and_down() -> None:
    sizes = {"tp8": 8, "tp4": 4, "tp1": 1}
    document = deployment(
        model={
            "sim": {"profile": "h100-8b", "wake_s": 3},
            "shapes": {
                name: {"gpus": gpus, "tensor_parallel": gpus, "max_in_flight": 256}
                for name, gpus in sizes.items()
            },
            "modes": {
                name: {"shape": name, "replicas": {"min": 1, "max": 8 // gpus}}
                for name, gpus in sizes.items()
            },
        },
        control={"slo": {"ttft_p95_s": 0.5, "itl_p95_s": 0.0045}, "mode": {"confirm_s": 20, "dwell_s": 60}},
        budget={"gpus": 8},
    )
    record = run(document, steps(10.0, 60.0, 120.0, 60.0, each_s=120.0, output=300.0))
    modes = [mode for mode, _ in groupby(moment.mode for moment in record.moments)]
    assert modes == ["tp8", "tp4", "tp1", "tp4"]
    assert not (record.requests["m"].outcome == RequestOutcome.FAILED).any()
    assert record.gpu_s == pytest.approx(8 * record.ends_at)


@pytest.mark.slow
def test_a_fallback_provider_takes_refused_requests_within_its_spend_cap() -> None:
    upstream = {
        "name": "cloud",
        "url": "https://cloud.example",
        "models": {"m": "big"},
        "price": {"input": 1.0, "output": 1.0},
        "cost_cap_per_h": 0.05,
    }
    record = run(deployment(upstreams=[upstream]), arrivals(12.0, 120.0), {"static": {"replicas": 1}})
    outcome = record.requests["m"].outcome
    assert (outcome == RequestOutcome.SPILLED_OVER).any() and (outcome == RequestOutcome.REFUSED).any()
    assert 0.0 < record.spillover_cost <= 0.05


def test_progress_is_reported() -> None:
    reported: list[float] = []
    run(deployment(), arrivals(0.5, 60.0), progress=reported.append)
    assert reported == sorted(reported) and len(reported) > 4


def test_a_trace_for_several_models_must_name_the_model() -> None:
    named = [Arrival(0.0, 10, 10, model="gpt")]
    assert len(run(deployment(), iter(named)).requests["m"]) == 1
    one = {
        "engine": "sim",
        "shapes": {"small": {"gpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": 1}},
    }
    two = parse({"models": [{"name": "a", **one}, {"name": "b", **one}]})
    with pytest.raises(ConfigError, match="got 'gpt', expected one of: a, b"):
        run(two, iter(named))
    both = run(two, iter([Arrival(0.0, 10, 10, model="b"), Arrival(1.0, 10, 10)]))
    assert [len(both.requests[name]) for name in ("a", "b")] == [1, 1]


@pytest.mark.slow
def test_a_schedule_holds_by_the_clock_of_its_time_zone() -> None:
    morning = {"start": "0 8 * * *", "end": "5 8 * * *", "timezone": "Europe/Berlin", "min": 4}
    scale = {"schedules": [morning], "hold_s": 10}
    starts_at = datetime.fromisoformat("2024-07-01T05:55:00+00:00")
    made = run(
        deployment(control={"scale": scale}), arrivals(0.2, 900), scenario=FaultScenario(starts_at=starts_at)
    )
    counts = [(at, decision.count) for at, decision in made.decisions if at >= 299]
    raised = next(at for at, count in counts if count == 4)
    lowered = next(at for at, count in counts if at > raised and count < 4)
    assert 300 <= raised <= 305 and 600 <= lowered <= 620


@pytest.mark.slow
def test_requests_are_admitted_and_judged_by_the_slo_of_their_priority() -> None:
    """Two tenants overload a replica: the one with a loose SLO waits where it was refused."""

    def shares(by_priority: dict[str, Any]) -> list[float]:
        tenants = [
            {"name": name, "keys_sha256": [digit * 64], "priority": name}
            for name, digit in (("standard", "a"), ("sheddable", "b"))
        ]
        document = deployment(
            control={"slo": {"ttft_p95_s": 1.0}, "slo_by_priority": by_priority}, tenants=tenants,
            gateway={"queue_timeout_s": 120},
        )  # fmt: skip
        trace = [
            arrival._replace(tenant=("standard", "sheddable")[i % 2])
            for i, arrival in enumerate(arrivals(3.0, 120))
        ]
        made = run(document, iter(trace), {"static": {"replicas": 1}}).requests["m"]
        return [float((made.outcome[i::2] == RequestOutcome.SERVED).mean()) for i in (0, 1)]

    assert shares({})[1] < 0.9
    assert shares({"sheddable": {"ttft_p95_s": 100.0}})[1] == 1.0
