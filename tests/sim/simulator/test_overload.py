"""Overload and fairness in the simulator: what is admitted keeps its SLO, and tenants get equal shares."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

import numpy as np
import pytest

from policy.config.deployment import Deployment
from policy.deployment_file.parse import parse
from policy.scaling.policies.registry import choose, make
from sim.arrivals import Arrival
from sim.simulator.run import simulate
from sim.simulator.run_record import RequestColumns, RequestOutcome
from tests.sim.simulator.test_run import arrivals, steps

pytestmark = pytest.mark.slow
# Two replicas of four slots serve about 6 of these requests a second.
CAPACITY, TTFT_S, LASTS_S = 5.0, 1.0, 60.0
TENANTS = ({"name": "light", "keys_sha256": ["0" * 64]}, {"name": "heavy", "keys_sha256": ["1" * 64]})


def deployment(profile: str = "l4-8b", slots: int = 4) -> Deployment:
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": profile},
        "shapes": {"small": {"gpus": 1, "max_in_flight": slots}},
        "modes": {"multi-replica": {"shape": "small", "replicas": 2}},
        "control": {"slo": {"ttft_p95_s": TTFT_S}, "policy": "static"},
    }
    return parse({"models": [model], "budget": {"gpus": 2}, "tenants": list(TENANTS)})


def of(tenant: str, rate: float, seed: int, lasts_s: float = LASTS_S) -> Iterator[Arrival]:
    return (each._replace(tenant=tenant) for each in arrivals(rate, lasts_s, seed, output=16.0))


def run(document: Deployment, *traces: Iterator[Arrival]) -> tuple[RequestColumns, list[str]]:
    trace = list(heapq.merge(*traces, key=lambda arrival: arrival.at))
    record = simulate(document, {"m": make(choose("policy", {"static": {"replicas": 2}}))}, trace)
    return record.requests["m"], [arrival.tenant for arrival in trace]


def test_admitted_requests_keep_their_latency_at_five_times_the_capacity() -> None:
    trace = steps(CAPACITY, 5 * CAPACITY, CAPACITY, each_s=LASTS_S, output=16.0)
    requests, _ = run(deployment(), trace)
    ttft_p95, goodput, outcomes = [], [], []
    for i in range(3):
        # The first seconds of a phase still serve the queue of the phase before.
        phase = (requests.at >= i * LASTS_S + 10) & (requests.at < (i + 1) * LASTS_S)
        served = phase & (requests.outcome == RequestOutcome.SERVED)
        ttft_p95.append(float(np.quantile(requests.ttft_s[served], 0.95)))
        goodput.append(int((requests.ttft_s[served] <= TTFT_S).sum()))
        outcomes.append(set(requests.outcome[phase].tolist()))
    assert ttft_p95[1] <= 1.5 * max(ttft_p95[0], TTFT_S / 2), ttft_p95
    assert goodput[1] >= 0.9 * goodput[0], goodput
    # Excess requests are refused at once: none is admitted and then fails or expires.
    assert outcomes[1] == {RequestOutcome.SERVED, RequestOutcome.REFUSED}
    assert goodput[2] >= 0.9 * goodput[0], goodput


def test_a_tenant_with_ten_times_the_demand_gets_an_equal_share() -> None:
    requests, tenants = run(deployment(), of("light", CAPACITY, 0), of("heavy", 10 * CAPACITY, 10))
    served = requests.outcome == RequestOutcome.SERVED
    light, heavy = (int((served & (np.array(tenants) == name)).sum()) for name in ("light", "heavy"))
    jain = (light + heavy) ** 2 / (2 * (light**2 + heavy**2))
    assert jain >= 0.98, (light, heavy)


def sized(trace: Iterator[Arrival], prompt: int) -> Iterator[Arrival]:
    return (arrival._replace(input_tokens=prompt) for arrival in trace)


# No slot is kept free: of few slots, one falls free every 0.2 s, as long as the light tenant's prompts take,
# and a request waits for two of them.
FEW = deployment(), of("light", 0.5, 0, 240.0), of("heavy", 10.0, 10, 240.0), 2.2
MANY = (
    deployment("h100-8b", 16),
    sized(of("light", 3.0, 0, 60.0), 2000),
    sized(of("heavy", 150.0, 10, 60.0), 150),
    1.5,
)


@pytest.mark.parametrize(("document", "light", "heavy", "most"), [FEW, MANY], ids=["few slots", "many slots"])
def test_a_tenant_over_its_share_barely_delays_another_tenant(
    document: Deployment, light: Iterator[Arrival], heavy: Iterator[Arrival], most: float
) -> None:
    quiet = list(light)
    alone, _ = run(document, iter(quiet))
    both, tenants = run(document, iter(quiet), heavy)
    beside = both.ttft_s[np.array(tenants) == "light"]
    assert np.isnan(beside).mean() <= 0.01
    assert np.nanquantile(beside, 0.95) <= most * np.quantile(alone.ttft_s, 0.95)


def switched(seed: int, *, wake_s: float, **scale: int) -> RequestColumns:
    """A switch by halves from two replicas of four GPUs to eight, while a long stream runs."""
    modes = {"tp4": (4, 2), "tp1": (1, 8)}
    model = {
        "name": "m",
        "engine": "sim",
        "sim": {"profile": "h100-8b", "speed": 0.1, "wake_s": wake_s},
        "shapes": {
            mode: {"gpus": gpus, "tensor_parallel": gpus, "max_in_flight": 4}
            for mode, (gpus, _) in modes.items()
        },
        "modes": {mode: {"shape": mode, "replicas": count} for mode, (_, count) in modes.items()},
        "control": {
            "tick_s": 1,
            "slo": {"itl_p95_s": 0.045},
            "mode": {"confirm_s": 5, "dwell_s": 60, "drain_timeout_s": 150},
            "scale": scale,
        },
    }
    document = parse({"models": [model], "budget": {"gpus": 8}, "gateway": {"queue_timeout_s": 300}})
    draw = random.Random(seed)  # noqa: S311 - no secret
    begins = [*(0.4 * i for i in range(200)), *(80 + 0.2 * i for i in range(1100))]
    trace = [
        Arrival(at, 10, 1500 if draw.random() < 0.01 else draw.choice((12, 25, 50, 100))) for at in begins
    ]
    made = simulate(document, {"m": make(choose("policy", "predictive"))}, iter(trace))
    assert [each.mode for _, each in made.decisions if each.mode != each.was_mode][:1] == ["tp1"]
    requests = made.requests["m"]
    assert np.all(requests.outcome == RequestOutcome.SERVED)
    return requests


@pytest.mark.parametrize("seed", [2, 3])
def test_a_switch_by_halves_refuses_nothing_that_is_served_in_time(seed: int) -> None:
    """While a long stream drains, few requests begin: that is over before any of them is late."""
    assert np.max(switched(seed, wake_s=1).queued_s) < 60


@pytest.mark.parametrize("min_healthy", [1, 2])
def test_in_a_switch_by_halves_some_replica_always_takes_requests(min_healthy: int) -> None:
    """Also where the switch is below ``min_healthy`` for as long as the first new replicas start."""
    requests = switched(2, wake_s=60, min_healthy=min_healthy)
    assert np.max(np.diff(np.sort(requests.at + requests.queued_s))) < 10
