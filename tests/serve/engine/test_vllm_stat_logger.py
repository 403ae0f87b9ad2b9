"""vLLM's metrics, counted with less work."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Histogram, generate_latest

pytest.importorskip("vllm", reason="vLLM is not installed")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
BOUNDS = (0.01, 0.1, 1.0, 10.0)


def test_values_taken_together_are_counted_as_one_by_one() -> None:
    from serve.engine.vllm_stat_logger import BatchHistogram  # noqa: PLC0415 - imports vLLM

    chance = random.Random(1)  # noqa: S311 - the same each time
    exposed = []
    given = [
        [chance.choice([*BOUNDS, chance.random() * 12]) for _ in range(size)] for size in (0, 1, 16, 256)
    ]
    for kind in (Histogram, BatchHistogram):
        registry = CollectorRegistry()
        histogram = kind("took_seconds", "Time.", ["engine"], buckets=BOUNDS, registry=registry).labels("0")
        for step in given:
            if isinstance(histogram, BatchHistogram):
                histogram.observe_all(step)
            else:
                for amount in step:
                    histogram.observe(amount)
        text = generate_latest(registry).decode()
        exposed.append([line for line in text.splitlines() if "_created" not in line and "_sum" not in line])
        total = registry.get_sample_value("took_seconds_sum", {"engine": "0"})
        assert total == pytest.approx(sum(map(sum, given)))
    assert exposed[0] == exposed[1]


def test_a_counter_ignores_nothing_but_nothing() -> None:
    from serve.engine.vllm_stat_logger import SparseCounter  # noqa: PLC0415 - imports vLLM

    registry = CollectorRegistry()
    counter = SparseCounter("tokens", "Tokens.", registry=registry)
    for amount in (0, 3, 0, 2.5):
        counter.inc(amount)
    counter.inc()
    assert registry.get_sample_value("tokens_total") == 6.5
    with pytest.raises(ValueError, match="non-negative"):
        counter.inc(-1)


def test_steps_counted_together_are_in_the_metrics_when_they_are_read() -> None:
    from vllm.config import VllmConfig  # noqa: PLC0415
    from vllm.v1.metrics.loggers import PrometheusStatLogger  # noqa: PLC0415
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats  # noqa: PLC0415

    from serve.engine.vllm_stat_logger import MAX_STEPS, StepMetrics  # noqa: PLC0415 - imports vLLM

    config = VllmConfig()
    model: Any = SimpleNamespace(served_model_name="tide", max_model_len=2048, is_diffusion=False)
    config.model_config = model
    exposed: list[list[list[str]]] = []
    for kind in (PrometheusStatLogger, StepMetrics):
        logger = kind(config, [0])
        read = []
        for step in range(2 * MAX_STEPS + 3):
            stats = None if step % 7 == 5 else IterationStats()
            if stats is not None:
                stats.num_generation_tokens = step
                stats.inter_token_latencies_iter = [0.25 * step] * step
            scheduled = (
                None if step % 11 == 3 else SchedulerStats(num_running_reqs=step, kv_cache_usage=step / 8)
            )
            logger.record(scheduled, stats)
            if step in (3, 2 * MAX_STEPS + 2):
                lines = generate_latest(REGISTRY).decode().splitlines()
                read.append([line for line in lines if line.startswith("vllm:") and "_created" not in line])
        exposed.append(read)
    assert len(exposed[0][1]) > 100
    assert exposed[0] == exposed[1]
