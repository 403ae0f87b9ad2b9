"""Numbers of models and of a bounded number of adapters, published once each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics import MetricWrapperBase

from gateway.intake.adapter_catalog import CatalogView
from gateway.protocol.usage import TokenUsage
from gateway.telemetry import adapter_metrics, metric_families, tenant_metrics
from gateway.telemetry.metrics import LABELS, WorkerMetrics
from policy.types import Priority
from policy.wire.adapter_catalog import NAME, Alias, CatalogSnapshot
from tests.gateway.fake_replica import alias


def call(outcome: str, first_byte_at: float | None = None) -> Any:
    return SimpleNamespace(outcome=outcome, first_byte_at=first_byte_at)


def samples(metrics: WorkerMetrics, name: str) -> dict[str, float]:
    """The samples of one metric by their labels."""
    metrics.publish()
    found = [each for family in metrics.collect() for each in family.samples if each.name == name]
    return {_text(each.labels): each.value for each in found}


def _text(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{label}="{value}"' for label, value in sorted(labels.items())) + "}"


@contextmanager
def full_disk(patch: pytest.MonkeyPatch, after: int) -> Iterator[None]:
    """Metric files that can grow for ``after`` more series, and no further."""
    labels, left = MetricWrapperBase.labels, itertools.count(after, -1)

    def grow(metric: Any, *values: str) -> Any:
        if next(left) <= 0:
            raise OSError("no room")
        return labels(metric, *values)

    with patch.context() as full, pytest.raises(OSError, match="no room"):
        full.setattr(MetricWrapperBase, "labels", grow)
        yield


def sent(metrics: WorkerMetrics, *names: str) -> None:
    for name in names:
        metrics.adapters.of("alpha", name).count(call("ok"), 0.0)


def counted(metrics: WorkerMetrics) -> dict[str, float]:
    """Requests by the label of their adapter."""
    found = samples(metrics, "tidegate_adapter_requests_total")
    return {labels.split('"')[1]: value for labels, value in found.items()}


def alphas(*names: str) -> set[tuple[str, str]]:
    return {("alpha", name) for name in names}


def test_errors_of_predicted_cached_tokens_do_not_cancel() -> None:
    metrics = WorkerMetrics()
    for predicted, reported in ((512, 512), (512, 0), (0, 64), (100, 80)):
        metrics.model("m").predicted_cached(predicted, reported)
    total, error = "tidegate_cached_prompt_tokens_total", "tidegate_cached_prompt_tokens_error_total"
    assert list(samples(metrics, total).values()) == [1124.0, 656.0]  # predicted, reported
    assert samples(metrics, error) == {'{model="m",sign="above"}': 532.0, '{model="m",sign="below"}': 64.0}


def test_requests_tokens_and_first_bytes_are_counted_by_name() -> None:
    metrics = WorkerMetrics()
    metrics.adapters.follow(alphas("sql"))
    meter = metrics.adapters.of("alpha", "sql")
    meter.count(call("ok", 10.3), 10.0)
    meter.count(call("ok"), 10.0)
    meter.count(call("adapter_failed"), 10.0)
    meter.tokens.count(TokenUsage(prompt=5, cached=2, completion=3))
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


def test_adapters_of_a_model_beyond_the_bound_share_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_metrics, "MOST", 3)
    metrics = WorkerMetrics()
    metrics.adapters.follow({(model, f"adapter-{i}") for model in ("alpha", "beta") for i in range(50)})
    for i in range(50):
        metrics.adapters.of("alpha", f"adapter-{i}").count(call("ok"), 0.0)
        metrics.adapters.of("beta", f"adapter-{i}").count(call("ok"), 0.0)
    for _ in range(2):  # adapters with a label keep it
        metrics.adapters.of("alpha", "adapter-0").count(call("ok"), 0.0)
    assert samples(metrics, "tidegate_adapter_requests_total") == {
        '{adapter="adapter-0",model="alpha",outcome="ok"}': 3.0,
        '{adapter="adapter-0",model="beta",outcome="ok"}': 1.0,
        '{adapter="adapter-1",model="alpha",outcome="ok"}': 1.0,
        '{adapter="_other",model="alpha",outcome="ok"}': 48.0,
        '{adapter="_other",model="beta",outcome="ok"}': 49.0,
    }


def test_a_name_that_the_catalog_drops_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_metrics, "MOST", 2)
    metrics = WorkerMetrics()
    metrics.adapters.follow(alphas("a", "b", "c"))
    sent(metrics, "a", "b", "c")
    metrics.adapters.follow(alphas("b", "c"))  # earlier counts of a are not lost
    sent(metrics, "b", "c", "a")  # a request for a ends late
    assert counted(metrics) == {"a": 1.0, "b": 2.0, "c": 1.0, "_other": 2.0}
    metrics.adapters.follow(alphas("a", "c"))  # a returns, and b is dropped
    sent(metrics, "a", "b", "c")
    assert counted(metrics) == {"a": 2.0, "b": 2.0, "c": 2.0, "_other": 3.0}


def test_a_worker_publishes_a_bounded_number_of_adapter_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_metrics, "MOST", 2)
    monkeypatch.setattr(adapter_metrics, "EVER", 5)
    metrics = WorkerMetrics()
    for i in range(50):
        metrics.adapters.follow(alphas(f"a-{i}"))
        sent(metrics, f"a-{i}")
    assert counted(metrics) == {**{f"a-{i}": 1.0 for i in range(5)}, "_other": 45.0}
    metrics.adapters.follow(alphas("a-3", "new"))
    sent(metrics, "a-3", "new")  # a dropped name has no label any more
    assert counted(metrics) == {**{f"a-{i}": 1.0 for i in range(5)}, "a-3": 2.0, "_other": 46.0}


def test_counts_of_a_dropped_name_survive_a_failed_publish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = WorkerMetrics()
    metrics.adapters.follow(alphas("a"))
    sent(metrics, "a")
    metrics.adapters.follow(())
    with full_disk(monkeypatch, after=0):
        metrics.publish()
    for _ in range(2):
        assert counted(metrics) == {"a": 1.0}


def test_adapter_metrics_follow_the_catalog() -> None:
    metrics = WorkerMetrics()
    view = CatalogView(lambda: 0, metrics.adapters.follow)
    for names in (("a",), ("b",)):
        aliases = [msgspec.convert(alias(name, "0" * 64), Alias) for name in names]
        view.take(CatalogSnapshot(epoch=1.0, version=1, aliases=tuple(aliases)))
        sent(metrics, "a", "b")
    assert counted(metrics) == {"a": 1.0, "b": 1.0, "_other": 2.0}


def test_no_adapter_can_have_the_shared_label() -> None:
    assert NAME.fullmatch(adapter_metrics.OTHER) is None


@pytest.mark.parametrize("after", range(24))
def test_a_full_disk_loses_and_repeats_no_count(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    metrics = WorkerMetrics()
    meter = metrics.model("m")
    meter.requests["/v1/chat/completions", "ok"] += 2
    meter.attempts["served"] += 3
    meter.streams["0.1", "0.01"] += 4
    meter.tokens.count(TokenUsage(1, 1, 3))
    meter.coalesced_calls = meter.coalesced_requests = meter.queue.displaced = meter.queue.predicted = 6
    meter.queue.refused["queue_full"] += 7
    for _ in range(8):
        meter.totals.judge(0.1, 0.01, Priority.STANDARD)
    with full_disk(monkeypatch, after):
        metrics.publish()
    metrics.publish()
    expected = {
        "requests": 2, "replica_attempts": 3, "served_streams": 4, "tokens": 5, "coalesced_calls": 6,
        "coalesced_requests": 6, "queue_displaced": 6, "queue_foreseen": 6, "queue_refused": 7,
        "slo_judged": 8, "slo_met": 24,
    }  # fmt: skip
    assert {name: sum(samples(metrics, f"tidegate_{name}_total").values()) for name in expected} == expected


def test_requests_without_a_model_are_counted_under_one_label_and_nothing_else_is() -> None:
    metrics = WorkerMetrics()
    metrics.model("alpha")
    metrics.no_model.requests["/v1/completions", "unknown_model"] += 2
    metrics.no_model.requests["_none", "head_too_large"] += 1
    assert samples(metrics, "tidegate_requests_total") == {
        '{model="_none",outcome="unknown_model",route="/v1/completions"}': 2.0,
        '{model="_none",outcome="head_too_large",route="_none"}': 1.0,
    }
    found = [each for family in metrics.collect() for each in family.samples]
    assert not [each for each in found if "" in each.labels.values() and "error_type" not in each.labels]
    assert {each.name for each in found if "_none" in each.labels.values()} <= {
        "tidegate_requests_total", "tidegate_requests_created"
    }  # fmt: skip


def test_replicas_have_names_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_families, "MOST_REPLICAS", 2)
    metrics = WorkerMetrics()
    for name in ("r1", "r2", "r3", "r1", "r4"):
        metrics.model("m").resets[name] += 1
        metrics.publish()
    assert samples(metrics, "tidegate_replica_resets_total") == {
        '{model="m",replica="r1"}': 2.0, '{model="m",replica="r2"}': 1.0, '{model="m",replica="_other"}': 2.0
    }  # fmt: skip


def test_tenants_are_counted_by_name_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_metrics, "MOST", 2)
    metrics = WorkerMetrics()
    for name in ("web", "night", "web", "third", "fourth", ""):
        counters = metrics.tenants.of(name)
        counters.requests["ok"] += 1
        counters.queued_s += 0.5
        counters.tokens.count(TokenUsage(prompt=5, cached=2, completion=3))
    for _ in range(2):
        assert samples(metrics, "tidegate_tenant_requests_total") == {
            '{outcome="ok",tenant="web"}': 2.0, '{outcome="ok",tenant="night"}': 1.0,
            '{outcome="ok",tenant="_other"}': 2.0, '{outcome="ok",tenant="_none"}': 1.0,
        }  # fmt: skip
    assert samples(metrics, "tidegate_tenant_queue_seconds_total") == {
        '{tenant="web"}': 1.0, '{tenant="night"}': 0.5, '{tenant="_other"}': 1.0, '{tenant="_none"}': 0.5
    }  # fmt: skip
    tokens = samples(metrics, "tidegate_tenant_tokens_total")
    assert tokens['{kind="completion",tenant="web"}'] == 6.0
    assert tokens['{kind="cached",tenant="_other"}'] == 4.0
    assert not NAME.fullmatch("_other") and not NAME.fullmatch("_none")


@contextmanager
def counting_labels(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a series was looked up, in one number."""
    labels, count = MetricWrapperBase.labels, [0]

    def look_up(metric: Any, *values: str) -> Any:
        count[0] += 1
        return labels(metric, *values)

    with patch.context() as counted:
        counted.setattr(MetricWrapperBase, "labels", look_up)
        yield count


def test_a_slice_of_many_labels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = WorkerMetrics()
    metrics.adapters.follow([("alpha", f"a-{i}") for i in range(100)])
    for name in ("alpha", "beta"):
        metrics.model(name)
    for i in range(200):
        metrics.tenants.of(f"t-{i}").requests["ok"] += 1
    sent(metrics, *(f"a-{i}" for i in range(100)))
    with counting_labels(monkeypatch) as looked_up:
        slices = []
        for _ in metrics.slices():
            slices.append(looked_up[0])
            looked_up[0] = 0
    assert max(slices) <= 6 * LABELS
    assert sum(counted(metrics).values()) == 100.0
    assert sum(samples(metrics, "tidegate_tenant_requests_total").values()) == 200.0


# What happens between two slices: a tenant's or an adapter's request, or the catalog drops all but some
# adapters, or a publication begins, or all is published at once.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("tenant"), st.integers(0, 5)),
        st.tuples(st.just("adapter"), st.integers(0, 5)),
        st.tuples(st.just("model"), st.integers(0, 2)),
        st.tuples(st.just("follow"), st.integers(0, 6)),
        st.tuples(st.just("slice"), st.integers(0, 1)),
        st.tuples(st.just("publish"), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_nothing_is_lost_or_counted_twice_whatever_happens_between_slices(
    events: list[tuple[str, int]],
) -> None:
    metrics, expected = WorkerMetrics(), Counter[str]()
    running: list[Iterator[None]] = [iter(()), iter(())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.telemetry.metrics.LABELS", 1)
        for kind, number in events:
            if kind == "tenant":
                metrics.tenants.of(f"t-{number}").requests["ok"] += 1
            elif kind == "adapter":
                sent(metrics, f"a-{number}")
            elif kind == "model":
                metrics.model(f"m-{number}").attempts["served"] += 1
            elif kind == "follow":
                metrics.adapters.follow(alphas(*(f"a-{i}" for i in range(number))))
            elif kind == "publish":
                metrics.publish()
            elif next(running[number], running) is running:  # it has ended
                running[number] = metrics.slices()
            expected[kind] += 1
    # Those that run are given up, as at the end of a worker.
    published = {
        "tenant": "tidegate_tenant_requests_total",
        "adapter": "tidegate_adapter_requests_total",
        "model": "tidegate_replica_attempts_total",
    }
    for kind, name in published.items():
        assert sum(samples(metrics, name).values()) == expected[kind]
