"""The simulated engine over HTTP and the simulator have the same latencies for the same arrivals."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import pytest

from policy.engine.batch_scheduler import BatchScheduler, EngineRequest
from policy.engine.builtin_profiles import profile
from policy.engine.performance_model import Timing
from policy.engine.prefix_cache import PrefixCache, block_hashes
from policy.scaling.policies.registry import choose, make
from sim.simulator.engine import EngineJob, TokenEventKind, VirtualTimeEngine
from tests.tidegate.conftest import Site
from tidegate.calibrate.simulator_check import check, recorded_run
from tidegate.deployment_file import load

pytestmark = [pytest.mark.process, pytest.mark.long]

# Prompts of half a second, so that the network time is small in comparison.
WORKLOAD = """
duration_s: 60
mix:
  - generate:
      arrivals: {rate: 0.7}
      input_tokens: {p50: 1500, p99: 3500}
      output_tokens: {p50: 40, p99: 150}
"""


@pytest.fixture
def sim(site: Site) -> Site:
    document = site.shipped("sim.yaml")
    document["gateway"]["workers"] = 1
    document["models"][0]["modes"]["multi-replica"]["replicas"] = 1
    site.up(document)
    return site


def test_measured_latencies_agree_with_the_simulator(sim: Site, tmp_path: Path) -> None:
    workload, record = tmp_path / "workload.yaml", tmp_path / "record.jsonl"
    workload.write_text(WORKLOAD)
    url = f"http://127.0.0.1:{sim.port}"
    code, _, err = sim.tidegate(
        "replay", str(workload), "--url", url, "--model", "sim", "--seed", "3", "--record", str(record)
    )
    assert code == 0, err
    deployment = load(sim.file, ray=False).deployment
    policies = {"sim": make(choose("policy", "static"))}
    found = check(deployment, policies, recorded_run(record), 0.0, lambda at: None).compared
    assert found.live == found.simulated > 30
    quantiles = found.quantiles
    compared = [quantiles[measure]["p50"] for measure in ("ttft", "itl", "e2e")]
    # With forty requests the 90th percentile of the gaps is one of two neighbouring values.
    compared += [quantiles[measure]["p90"] for measure in ("ttft", "e2e")]
    assert all(abs(pair.error) <= 0.05 for pair in compared), quantiles


# A small KV cache, filled by prompts of two or three blocks, some with a common prefix.
TIMED = profile("cpu-smollm2-135m")


def crowd(rate: float, seed: int) -> list[tuple[float, EngineJob]]:
    rng, at, jobs = random.Random(seed), 0.0, []  # noqa: S311 - no secret is drawn
    for number in range(150):
        at += rng.expovariate(rate)
        prompt = min(1899, max(200, int(rng.gauss(1500, 300))))
        answer = min(2047 - prompt, max(8, int(rng.expovariate(1 / 200))))
        blocks = [10 * number + i + 100 for i in range(prompt // 512)]
        if blocks and rng.random() < 0.3:
            blocks[0] = rng.randrange(6)
        jobs.append((at, EngineJob(number, prompt, answer, "", tuple(blocks))))
    return jobs


def as_engine(jobs: list[tuple[float, EngineJob]]) -> tuple[dict[int, tuple[float, float]], int]:
    """Times of first and last tokens in the simulated engine, and its preemptions."""
    limits = TIMED.limits(1)
    scheduler = BatchScheduler(TIMED.model, limits, PrefixCache(limits.kv_tokens))
    firsts: dict[int, float] = {}
    found: dict[int, tuple[float, float]] = {}
    preempted, now, coming = 0, 0.0, list(reversed(jobs))
    while coming or scheduler.running or scheduler.waiting:
        if not scheduler.running + scheduler.waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, job = coming.pop()
            tokens = [(block, i) for block in job.blocks for i in range(512)]
            tokens += [(-job.number - 1, i) for i in range(job.input_tokens - len(tokens))]
            blocks = block_hashes(tokens, "")
            scheduler.submit(
                EngineRequest(str(job.number), job.input_tokens, job.output_tokens, blocks=blocks)
            )
        result = scheduler.step()
        now += result.duration_s
        preempted += len(result.preempted)
        firsts.update((int(name), now) for name in result.first)
        found.update((int(name), (firsts[int(name)], now)) for name in result.finished)
    return found, preempted


def as_twin(jobs: list[tuple[float, EngineJob]]) -> dict[int, tuple[float, float]]:
    limits = TIMED.limits(1)
    engine = VirtualTimeEngine(Timing(limits=limits, model=TIMED.model), prefix_tokens=limits.kv_tokens)
    for at, job in jobs:
        engine.submit(job, at)
    events = engine.advance(jobs[-1][0] + 1e6)
    return {event.number: (event.first_at, event.at) for event in events if event.kind is TokenEventKind.DONE}


@pytest.mark.parametrize(("rate", "seed"), [(0.13, 1), (0.16, 2), (0.3, 3)])
def test_latencies_agree_when_the_kv_cache_is_full(rate: float, seed: int) -> None:
    jobs = crowd(rate, seed)
    live, preempted = as_engine(jobs)
    twin = as_twin(jobs)
    assert preempted > 20 and set(live) == set(twin)
    came = {job.number: at for at, job in jobs}
    for which in (0, 1):
        expected = median(live[number][which] - came[number] for number in came)
        got = median(twin[number][which] - came[number] for number in came)
        assert got == pytest.approx(expected, rel=0.05)
