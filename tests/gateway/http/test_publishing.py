"""What is counted reaches the shared metrics once, also when they cannot be written for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gateway.http.reserve_descriptor import ReserveDescriptor
from gateway.telemetry.metrics import Metrics


@contextmanager
def failing(patch: pytest.MonkeyPatch, metric: Any) -> Iterator[None]:
    """A metric whose file cannot grow."""

    def labels(*_: object) -> None:
        raise OSError("no descriptor")

    with patch.context() as context:
        context.setattr(metric, "labels", labels)
        yield


@pytest.mark.parametrize("what", ["_requests", "_attempts", "_streams", "_tokens"])
def test_nothing_is_counted_twice_or_lost(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    metrics = Metrics()
    meter = metrics.model("m")
    meter.requests["/v1/chat/completions", "ok"] += 2
    meter.attempts["served"] += 3
    meter.streams["0.1", "0.01"] += 4
    meter.completion_tokens += 5
    with failing(monkeypatch, getattr(metrics, what)), pytest.raises(OSError, match="no descriptor"):
        metrics.publish()
    metrics.publish()
    lines = metrics.render().decode().splitlines()
    counted = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[:1] != "#"}
    assert counted['tidegate_requests_total{model="m",outcome="ok",route="/v1/chat/completions"}'] == 2
    assert counted['tidegate_upstream_attempts_total{model="m",outcome="served"}'] == 3
    assert counted['tidegate_tokens_total{kind="completion",model="m"}'] == 5
    assert (
        sum(value for name, value in counted.items() if name.startswith("tidegate_served_streams_total")) == 4
    )


def test_a_spare_descriptor_is_there_when_it_is_given() -> None:
    spare = ReserveDescriptor()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert spare.give()
    assert len(set(os.listdir("/proc/self/fd"))) == len(before) - 1  # noqa: PTH208
    assert not spare.give()
    spare.keep()
    spare.keep()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert spare.give()
