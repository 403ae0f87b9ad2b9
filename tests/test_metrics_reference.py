"""docs/metrics.md has the table of every metric; `python -m tests.test_metrics_reference` writes it anew."""

from __future__ import annotations

import re

import pytest

from policy.wire.metric_definitions import GROUPS, METRICS, Metric, MetricType
from tests.generated_page import GeneratedPage

PAGE = GeneratedPage("metrics.md", "## All metrics\n")
_BASE_UNITS = {"seconds", "bytes", "ratio", "watts", "joules", "celsius"}


def table() -> str:
    """The generated part of the page."""
    text = ""
    for group in GROUPS:
        text += f"\n### {group.title}\n\n{group.source}\n\n"
        text += "| Metric | Type | Unit | Labels | Meaning |\n|---|---|---|---|---|\n"
        text += "".join(_row(metric) for metric in group.metrics)
    return text


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    when = f" Present {metric.when}." if metric.when else ""
    return f"| `{metric.series}` | {metric.kind} | {metric.unit} | {labels} | {metric.text}{when} |\n"


def test_the_page_has_the_table_of_the_code() -> None:
    assert PAGE.generated == table()


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_a_name_keeps_to_the_rules_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"(tidegate|gen_ai)(_[a-z0-9]+)+", metric.name)
    assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_created"))
    assert metric.text.endswith(".")
    if metric.unit in _BASE_UNITS and metric.kind is not MetricType.HISTOGRAM:
        assert metric.name.endswith(f"_{metric.unit}")
    assert all(re.fullmatch(r"[a-z_]+", label) for label in metric.labels)


def test_no_metric_is_listed_twice() -> None:
    assert len(METRICS) == sum(len(group.metrics) for group in GROUPS)


if __name__ == "__main__":
    PAGE.write(table())
