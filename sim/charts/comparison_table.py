"""The table of a comparison: the rows of a summary and their headings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sim.oracle.offline_optimum import GpuHourBounds
from sim.results.run_summary import RunSummary


class ComparisonRow(NamedTuple):
    """A row of the table."""

    heading: str
    shown: Callable[[RunSummary], str]


def seconds(value: float | None) -> str:
    """A duration in milliseconds or seconds, whichever is shorter."""
    if value is None:
        return "-"
    return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def percent(value: float | None) -> str:
    """A fraction as a percentage, with the digits that 99.9 % needs."""
    return "-" if value is None else f"{100 * value:.2f}%"


def comparison_rows(bounds: GpuHourBounds) -> tuple[ComparisonRow, ...]:
    """The rows, with those of the offline optimum where it was computed."""
    achievable = bounds.achievable_gpu_hours
    rows = (
        ComparisonRow("attainment", lambda s: percent(s.attainment)),
        ComparisonRow("TTFT p50", lambda s: seconds(s.ttft_p50_s)),
        ComparisonRow("TTFT p95", lambda s: seconds(s.ttft_p95_s)),
        ComparisonRow("TTFT p99", lambda s: seconds(s.ttft_p99_s)),
        ComparisonRow("ITL p50", lambda s: seconds(s.itl_p50_s)),
        ComparisonRow("ITL p95", lambda s: seconds(s.itl_p95_s)),
        ComparisonRow("E2E p50", lambda s: seconds(s.e2e_p50_s)),
        ComparisonRow("E2E p95", lambda s: seconds(s.e2e_p95_s)),
        ComparisonRow("E2E p99", lambda s: seconds(s.e2e_p99_s)),
        ComparisonRow("goodput", lambda s: f"{s.goodput_rps:.3g}/s"),
        ComparisonRow("failed", lambda s: f"{s.failed} of {s.requests}"),
        ComparisonRow("GPU-hours", lambda s: f"{s.gpu_hours:.3f}"),
        ComparisonRow("over the lower bound", lambda s: _times(s.oracle_ratio)),
        ComparisonRow(
            "over the clairvoyant plan", lambda s: _times(s.gpu_hours / achievable if achievable else None)
        ),
        ComparisonRow("cost", lambda s: f"{s.cost + s.spillover_cost:.2f}"),
        ComparisonRow("energy", lambda s: f"{s.joules / 3.6e6:.3g} kWh"),
        ComparisonRow("switches", lambda s: str(s.switches)),
        ComparisonRow("decisions", lambda s: str(s.decisions)),
        ComparisonRow("preemptions", lambda s: str(s.preemptions)),
        ComparisonRow("adapter loads", lambda s: str(s.adapter_loads)),
    )
    return rows if achievable else tuple(row for row in rows if not row.heading.startswith("over the"))


def describe_bounds(bounds: GpuHourBounds) -> str:
    """The bounds of the offline optimum in one line."""
    if bounds.lower_gpu_hours is None or bounds.achievable_gpu_hours is None:
        return f"no bounds: {bounds.why}"
    return (
        f"offline optimum: at least {bounds.lower_gpu_hours:.3f} GPU-hours, "
        f"{bounds.achievable_gpu_hours:.3f} by a clairvoyant plan"
    )


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
