"""The SLO tab of locust's web page, and its CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from flask import Response, request

from loadtests import report
from loadtests.slo import Ledger

TAB = "slo"


def extend(web_ui: Any, ledger: Ledger) -> None:
    """Add the tab by the means that locust documents for extending its page."""
    structure = [{"key": key, "title": title} for key, title in report.COLUMNS.items()]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Goodput", "key": TAB}],
        "extended_tables": [{"key": TAB, "structure": structure}],
        "extended_csv_files": [{"href": "/slo.csv", "title": "Download goodput CSV"}],
    }

    def add_rows(response: Response) -> Response:
        if request.path == "/stats/requests" and response.is_json:
            statistics = {
                **response.get_json(),
                "extended_stats": [{"key": TAB, "data": report.rows(ledger)}],
            }
            response.set_data(web_ui.app.json.dumps(statistics))
        return response

    def as_csv() -> Response:
        file = io.StringIO()
        writer = csv.DictWriter(file, report.COLUMNS)
        writer.writerow(report.COLUMNS)
        writer.writerows(report.rows(ledger))
        headers = {"content-disposition": "attachment; filename=slo.csv"}
        return Response(file.getvalue(), mimetype="text/csv", headers=headers)

    web_ui.app.after_request(add_rows)
    web_ui.app.add_url_rule("/slo.csv", "slo_csv", as_csv)
