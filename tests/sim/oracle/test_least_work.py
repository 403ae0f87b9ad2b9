"""No run takes less than the least work of what it serves, whatever is shared and however many replicas."""

from __future__ import annotations

import random

import numpy as np
import pytest

from policy.config.control import SloConfig
from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.engine.builtin_profiles import shipped
from policy.engine.performance_model import Timing
from policy.scaling.policies.static import Static
from sim.arrivals import Arrival
from sim.benchmarks.policies.benchmark_setup import MODEL
from sim.oracle.least_work import least_problem, least_work, tokens_of
from sim.oracle.provisioning_problem import ProvisioningProblem
from sim.simulator.run import simulate
from sim.simulator.run_record import RequestOutcome


def deployment(profile: str, replicas: int = 1) -> Deployment:
    model = {
        "name": MODEL,
        "engine": "sim",
        "sim": {"profile": profile},
        "shapes": {"one": {"gpus": 1}},
        "modes": {"multi-replica": {"shape": "one", "replicas": replicas}},
    }
    return parse({"models": [model], "gateway": {"max_queue": 100_000, "queue_timeout_s": 86_400}})


def timing_of(document: Deployment) -> Timing:
    spec = document.models[0]
    return shipped(spec, spec.shapes["one"])


@pytest.mark.slow
@pytest.mark.parametrize("profile", [pytest.param("l4-8b", marks=pytest.mark.long), "h100-8b"])
@pytest.mark.parametrize(
    ("prompt", "answer", "shared"),
    [(50, 400, 0), (1500, 200, 0), (4000, 1, 0), (3500, 60, 8), (3000, 300, 4)],
)
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_takes_at_least_the_least_work(
    profile: str, prompt: int, answer: int, shared: int, replicas: int
) -> None:
    rng = random.Random(prompt + answer)  # noqa: S311 - lengths
    arrivals = [
        Arrival(
            0.01 * i,
            prompt + rng.randrange(prompt),
            1 + rng.randrange(2 * answer),
            blocks=tuple(range(1000 * (i % 3), 1000 * (i % 3) + shared)),
        )
        for i in range(300)
    ]
    document = deployment(profile, replicas)
    record = simulate(document, {MODEL: Static()}, arrivals)
    assert (record.requests[MODEL].outcome == RequestOutcome.SERVED).all()
    taken_s, least_s = record.gpu_s, float(least_work(timing_of(document), tokens_of(arrivals)).sum())
    assert least_s <= taken_s
    if replicas == 1 and not shared:  # a busy engine comes near it
        assert least_s > 0.4 * taken_s


def test_the_work_of_any_part_is_bounded_by_what_it_takes_alone() -> None:
    rng = random.Random(1)  # noqa: S311 - lengths
    arrivals = [Arrival(float(i), rng.randrange(1, 4000), rng.randrange(1, 600)) for i in range(200)]
    timing = timing_of(deployment("l4-8b"))
    whole = least_work(timing, tokens_of(arrivals))
    for part in (slice(0, 20), slice(50, 180), slice(10, None, 7)):
        assert whole[part].sum() <= least_work(timing, tokens_of(arrivals[part])).sum() * (1 + 1e-9)
    assert np.all(whole > 0)


@pytest.mark.parametrize(("attainment", "served"), [(0.9, 9), (0.91, 10), (0.89, 9), (1.0, 10)])
def test_as_many_requests_may_be_missed_as_the_slo_allows(attainment: float, served: int) -> None:
    tokens = tokens_of([Arrival(float(i), 100, 10) for i in range(10)])
    shape = ProvisioningProblem(demand=np.zeros(1), bin_s=10.0, mu=1.0)
    slo = SloConfig(attainment=attainment)
    least = least_problem(tokens, np.ones(10), slo, since=0.0, until=10.0, wait_s=0.0, shape=shape)
    assert least.attainment * 10 == pytest.approx(served)


def test_answers_of_one_token_end_with_it() -> None:
    tokens = tokens_of([Arrival(float(i), 100, 1) for i in range(10)])
    shape = ProvisioningProblem(demand=np.zeros(2), bin_s=10.0, mu=1.0)
    slo = SloConfig(ttft_p95_s=5.0)
    least = least_problem(tokens, np.ones(10), slo, since=0.0, until=20.0, wait_s=0.0, shape=shape)
    assert least.wait_s == 20.0
