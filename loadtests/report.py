"""The table of a run: for the console, CSV files and locust's web page."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flask import Response, request
from rich.console import Console
from rich.table import Table

from loadtests.metrics_check import MetricComparison
from loadtests.slo_attainment import RequestSlo, RunStatistics, UserStatistics

# Keys are single words: the web page rewrites others.
COLUMNS = {
    "user": "User",
    "requests": "Requests",
    "failed": "Failed",
    "aborted": "Aborted",
    "ttft": "TTFT mean (ms)",
    "itl": "ITL mean (ms)",
    "e2e": "E2E mean (ms)",
    "prompt": "Prompt tokens/s",
    "output": "Output tokens/s",
    "goodput": "Goodput (/s)",
    "met": "SLO met (%)",
}
COMPARISON = ("", "unit", "users", "gateway", "difference (%)")
# Wide enough for every column, without a terminal.
PLAIN_WIDTH = 150


def rows(ledger: RunStatistics) -> list[dict[str, str]]:
    """One row for each kind of user and one for all."""
    tallies = sorted(ledger.tallies.items())
    return [_row(name, tally, ledger.seconds) for name, tally in [*tallies, ("all", ledger.total())]]


def _row(name: str, tally: UserStatistics, seconds: float) -> dict[str, str]:
    def mean(total_s: float, count: int) -> str:
        return f"{1000 * total_s / count:.1f}" if count else ""

    def rate(count: int) -> str:
        return f"{count / seconds:.2f}" if seconds > 0 else ""

    return {
        "user": name,
        "requests": str(tally.requests),
        "failed": str(tally.requests - tally.served),
        "aborted": str(tally.aborted),
        "ttft": mean(tally.ttft_s, tally.begun),
        "itl": mean(tally.itl_s, tally.gaps),
        "e2e": mean(tally.e2e_s, tally.served),
        "prompt": rate(tally.prompt_tokens),
        "output": rate(tally.tokens),
        "goodput": rate(tally.met),
        "met": f"{100 * tally.attainment:.1f}" if tally.requests else "",
    }


def comparison(compared: Sequence[MetricComparison]) -> list[tuple[str, ...]]:
    """The measurements of the users and of the gateway."""
    return [
        (row.name, row.unit, f"{row.users:.2f}", f"{row.gateway:.2f}", f"{100 * row.difference:+.1f}")
        for row in compared
    ]


def show(
    ledger: RunStatistics, objective: RequestSlo, compared: Sequence[MetricComparison], why_not: str
) -> None:
    """Print the tables; ``why_not`` is the reason why there is no comparison."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    limits = f"TTFT <= {objective.ttft_s:g} s and mean ITL <= {objective.itl_s:g} s"
    title = f"SLO: {limits}, over {ledger.seconds:.1f} s"
    _print(console, title, COLUMNS.values(), (row.values() for row in rows(ledger)))
    if why_not:
        console.print(f"No comparison with the gateway: {why_not}", markup=False)
    else:
        _print(console, "Users and gateway", COMPARISON, comparison(compared))


def _print(console: Console, title: str, heads: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=not place)
    for line in lines:
        table.add_row(*line)
    console.print(table)


def save(prefix: str, ledger: RunStatistics, compared: Sequence[MetricComparison]) -> None:
    """Write PREFIX_slo.csv, and PREFIX_gateway.csv if there is a comparison."""
    _write(f"{prefix}_slo.csv", COLUMNS.values(), (row.values() for row in rows(ledger)))
    if compared:
        _write(f"{prefix}_gateway.csv", ("quantity", *COMPARISON[1:]), comparison(compared))


def _write(path: str, heads: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(heads)
        writer.writerows(lines)


TAB = "slo"


def add_web_tab(web_ui: Any, ledger: RunStatistics) -> None:
    """Add a tab to locust's web page."""
    structure = [{"key": key, "title": title} for key, title in COLUMNS.items()]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Goodput", "key": TAB}],
        "extended_tables": [{"key": TAB, "structure": structure}],
        "extended_csv_files": [{"href": "/slo.csv", "title": "Download goodput CSV"}],
    }

    def add_rows(response: Response) -> Response:
        if request.path == "/stats/requests" and response.is_json:
            statistics = {**response.get_json(), "extended_stats": [{"key": TAB, "data": rows(ledger)}]}
            response.set_data(web_ui.app.json.dumps(statistics))
        return response

    def as_csv() -> Response:
        file = io.StringIO()
        writer = csv.DictWriter(file, COLUMNS)
        writer.writerow(COLUMNS)
        writer.writerows(rows(ledger))
        headers = {"content-disposition": "attachment; filename=slo.csv"}
        return Response(file.getvalue(), mimetype="text/csv", headers=headers)

    web_ui.app.after_request(add_rows)
    web_ui.app.add_url_rule("/slo.csv", "slo_csv", as_csv)
