"""Metrics of engines are joined by family, with the replica as a label, in both formats."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.engine_metrics import EngineMetrics
from serve.engine.interface import EngineStats
from serve.engine.sim.metrics import SimEngineMetrics as SimMetrics


def exposition(requests: int) -> bytes:
    metrics = SimMetrics("m")
    metrics.watch(lambda: EngineStats(running=requests, waiting=0, kv_used=0.25))
    for _ in range(requests):
        metrics.success("stop")
        metrics.ttft.observe(0.2)
    return metrics.exposition()


def counted(text: str, parse: object) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["replica"]): sample.value
        for family in parse(text)  # type: ignore[operator]
        for sample in family.samples
        if sample.name in ("vllm:request_success_total", "vllm:num_requests_running",
                           "vllm:time_to_first_token_seconds_count")
    }  # fmt: skip


def test_families_are_joined_in_both_formats() -> None:
    metrics = EngineMetrics()
    metrics.add("r1", exposition(2))
    metrics.add("r2", exposition(3))
    expected = {
        (name, replica): count
        for name in ("vllm:request_success_total", "vllm:num_requests_running",
                     "vllm:time_to_first_token_seconds_count")
        for replica, count in (("r1", 2.0), ("r2", 3.0))
    }  # fmt: skip
    text = metrics.text(openmetrics=False).decode()
    assert counted(text, text_string_to_metric_families) == expected
    assert "_created" not in text
    strict = metrics.text(openmetrics=True).decode() + "# EOF\n"
    assert counted(strict, openmetrics.text_string_to_metric_families) == expected


@pytest.mark.parametrize(
    "line",
    [
        b"vllm:x 1 2 3",
        b'vllm:x{a="b} 1',
        b"vllm:x{a=b} 1",
        b"vllm:x one",
        b"vllm:other 1",
        b"python_info 1",
        b'vllm:x{a="b"} 1 # {trace_id="1"} 1',
    ],
)
def test_a_line_that_is_not_valid_or_of_another_family_is_left_out(line: bytes) -> None:
    metrics = EngineMetrics()
    metrics.add("r", b"# HELP vllm:x X.\n# TYPE vllm:x gauge\n%b\nvllm:x 7\n" % line)
    assert (
        metrics.text(openmetrics=False) == b'# HELP vllm:x X.\n# TYPE vllm:x gauge\nvllm:x{replica="r"} 7\n'
    )


def test_a_family_keeps_its_first_type() -> None:
    metrics = EngineMetrics()
    metrics.add("r1", b"# TYPE vllm:x gauge\nvllm:x 1\n")
    metrics.add("r2", b"# TYPE vllm:x counter\nvllm:x 2\n")
    assert metrics.text(openmetrics=False).splitlines()[1:] == [
        b"# TYPE vllm:x gauge", b'vllm:x{replica="r1"} 1'
    ]  # fmt: skip
