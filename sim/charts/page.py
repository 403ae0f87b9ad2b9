"""The report as one HTML file: a table, and a column of charts for each policy, on common scales."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from policy.config.control import SloConfig
from sim.charts.comparison_table import comparison_rows, describe_bounds
from sim.charts.time_series_chart import (
    LEFT,
    MODES,
    RIGHT,
    WIDTH,
    Chart,
    ChartLine,
    common_span,
    draw,
    hovered,
)
from sim.results.chart_series import ChartData, QuantileSeries
from sim.results.run_summary import PolicyComparison

ALONE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
# Series with fewer windows are drawn as steps.
FEW = 60


def page(study: PolicyComparison) -> str:
    """The HTML file; it is well-formed XML and loads no other resource."""
    columns, values = _columns(study)
    title = f"{', '.join(run.name for run in study.runs)} on {study.trace}"
    # A script has no escapes, so the characters that could end it are encoded.
    frame = {"frame": [LEFT, RIGHT, WIDTH], "charts": values}
    data = json.dumps(frame, separators=(",", ":")).replace("&", "\\u0026").replace("<", "\\u003c")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            f'<meta http-equiv="Content-Security-Policy" content="{ALONE}"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>{escape(title)}</title><style>{_resource('report.css')}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="faint">Simulated, seed {study.seed}; {escape(describe_bounds(study.bounds))}.</p>',
            '<p class="faint">Point at a chart, or use the arrow keys on it: all charts tell that instant. '
            "Shift and an arrow key go to the next decision.</p>",
            _table(study),
            '<div class="columns">',
            *columns,
            '</div><div id="tip" role="status"></div>',
            f'<script id="values" type="application/json">{data}</script>',
            f"<script>{_resource('report.js')}</script></body></html>",
            "",
        ]
    )


def _resource(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _table(study: PolicyComparison) -> str:
    names = "".join(f'<th scope="col">{escape(run.name)}</th>' for run in study.runs)
    rows = []
    for figure in comparison_rows(study.bounds):
        cells = "".join(f"<td>{escape(figure.shown(run.summary))}</td>" for run in study.runs)
        rows.append(f'<tr><th scope="row">{escape(figure.heading)}</th>{cells}</tr>')
    head = f'<thead><tr><th scope="col">policy</th>{names}</tr></thead>'
    return f'<div class="wide"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _columns(study: PolicyComparison) -> tuple[list[str], dict[str, Any]]:
    """The markup of each column, and the values at each instant by chart id."""
    drawn = [picture for run in study.runs for picture in run.pictures]
    modes = tuple(dict.fromkeys(stay.mode for picture in drawn for stay in picture.stays))
    charts = [
        [
            replace(chart, modes=modes)
            for picture in run.pictures
            for chart in _charts(picture, study.objectives.get(picture.model, SloConfig()), len(run.pictures))
        ]
        for run in study.runs
    ]
    spans = {row[0].key: common_span(row) for row in zip(*charts, strict=True)}
    until = max(picture.ends_at for picture in drawn)
    columns, values = [], {}
    for number, (run, each) in enumerate(zip(study.runs, charts, strict=True)):
        parts = [f"<section aria-label={quoteattr(run.name)}><h2>{escape(run.name)}</h2>"]
        for index, chart in enumerate(each):
            identity = f"chart-{number}-{index}"
            values[identity] = hovered(chart)
            parts.append(f"<h3>{escape(chart.title)} <span>{escape(chart.unit or chart.note)}</span></h3>")
            parts.append(draw(chart, identity, until, spans[chart.key]))
            parts.append(_legend(chart))
        columns.append("\n".join([*parts, "</section>"]))
    return columns, values


def _charts(picture: ChartData, slo: SloConfig, models: int) -> Sequence[Chart]:
    of = f" of {picture.model}" if models > 1 else ""

    def chart(key: str, title: str, unit: str, *lines: ChartLine, **more: Any) -> Chart:
        return Chart(f"{picture.model} {key}", title + of, unit, lines, **more)

    def line(name: str, kind: str, values: Any, *, steps: bool = False, filled: bool = False) -> ChartLine:
        return ChartLine(name, kind, picture.width_s, values, steps=steps or len(values) < FEW, filled=filled)

    return (
        chart("load", "Load", "requests/s", line("arrivals", "a", picture.arrivals, filled=True)),
        chart(
            "replicas",
            "Replicas and mode",
            "",
            line("ready", "a", picture.ready, steps=True, filled=True),
            line("starting", "b", picture.starting, steps=True),
            line("draining", "c", picture.draining, steps=True),
            line("desired", "d", picture.wanted, steps=True),
            stays=picture.stays,
            marks=picture.marks,
            whole=True,
            note="triangles are decisions",
        ),
        chart("ttft", "Time to first token", "s", *_band(picture.ttft), log=True, limit=slo.ttft_p95_s),
        chart("itl", "Inter-token latency", "s", *_band(picture.itl), log=True, limit=slo.itl_p95_s),
        chart(
            "queue",
            "Queue",
            "requests at once",
            line("queued in the gateway", "b", picture.queued, filled=True),
            line("running", "a", picture.running),
            whole=True,
        ),
        chart(
            "met",
            "Within the SLO",
            "% of the last minute",
            line("met", "a", 100 * picture.met, filled=True),
            limit=100 * slo.attainment,
        ),
    )


def _band(band: QuantileSeries) -> tuple[ChartLine, ...]:
    few = len(band.p50) < FEW
    return (
        ChartLine("p99", "c", band.width_s, band.p99, above=band.p90, steps=few),
        ChartLine("p90", "b", band.width_s, band.p90, above=band.p50, steps=few),
        ChartLine("p50", "a", band.width_s, band.p50, steps=few),
    )


def _legend(chart: Chart) -> str:
    entries = []
    for line in chart.lines:
        name = line.name if np.isfinite(line.values).any() else f"{line.name} (none)"
        # The script writes the value at the pointer into <b>.
        entries.append((f'<path class="line {line.kind}" d="M0,4 22,4"/>', f"{escape(name)}<b></b>"))
    if chart.limit is not None:
        entries.append(('<path class="limit" d="M0,4 22,4"/>', f"SLO {chart.limit:g} {escape(chart.unit)}"))
    for index, mode in enumerate(chart.modes):
        if any(stay.mode == mode for stay in chart.stays):
            swatch = f'<rect class="mode{index % len(MODES)}" width="22" height="8"/>'
            entries.append((swatch, escape(mode)))
    items = (
        f'<li><svg viewBox="0 0 22 8" aria-hidden="true">{key}</svg>{text}</li>' for key, text in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
