"""Numbers of each adapter, for a bounded number of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gateway import adapter_meter
from gateway.metrics import Metrics
from gateway.usage import Usage


def call(outcome: str, first_byte_at: float | None = None) -> Any:
    return SimpleNamespace(outcome=outcome, first_byte_at=first_byte_at)


def samples(metrics: Metrics, name: str) -> dict[str, float]:
    """The samples of one metric by their labels."""
    lines = metrics.render().decode().splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith(name + "{")]
    return {labels.removeprefix(name): float(value) for labels, _, value in found}


def test_requests_tokens_and_first_bytes_are_counted_by_name() -> None:
    metrics = Metrics()
    meter = metrics.adapters.of("alpha", "sql")
    meter.count(call("ok", 10.3), 10.0)
    meter.count(call("ok"), 10.0)
    meter.count(call("adapter_failed"), 10.0)
    meter.count_tokens(Usage(prompt=5, cached=2, completion=3))
    for _ in range(2):  # what was published once is not published again
        assert samples(metrics, "tidegate_adapter_requests_total") == {
            '{adapter="sql",model="alpha",outcome="ok"}': 2.0,
            '{adapter="sql",model="alpha",outcome="adapter_failed"}': 1.0,
        }
        assert samples(metrics, "tidegate_adapter_tokens_total") == {
            '{adapter="sql",kind="prompt",model="alpha"}': 5.0,
            '{adapter="sql",kind="cached",model="alpha"}': 2.0,
            '{adapter="sql",kind="completion",model="alpha"}': 3.0,
        }
        buckets = samples(metrics, "tidegate_adapter_ttft_seconds_bucket")
        assert buckets['{adapter="sql",le="0.2",model="alpha"}'] == 0.0
        assert buckets['{adapter="sql",le="0.5",model="alpha"}'] == 1.0


def test_beyond_the_bound_all_others_of_a_model_share_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_meter, "MOST", 3)
    metrics = Metrics()
    for i in range(50):
        metrics.adapters.of("alpha", f"adapter-{i}").count(call("ok"), 0.0)
        metrics.adapters.of("beta", f"adapter-{i}").count(call("ok"), 0.0)
    for _ in range(2):  # those that have a label keep it
        metrics.adapters.of("alpha", "adapter-0").count(call("ok"), 0.0)
    assert samples(metrics, "tidegate_adapter_requests_total") == {
        '{adapter="adapter-0",model="alpha",outcome="ok"}': 3.0,
        '{adapter="adapter-0",model="beta",outcome="ok"}': 1.0,
        '{adapter="adapter-1",model="alpha",outcome="ok"}': 1.0,
        '{adapter="other",model="alpha",outcome="ok"}': 48.0,
        '{adapter="other",model="beta",outcome="ok"}': 49.0,
    }
