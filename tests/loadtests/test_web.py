"""The objective's tab on locust's web page, over the routes that the page asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from flask import Flask

from loadtests import report
from loadtests.slo import Ledger, Objective, Outcome


def test_the_page_has_a_tab_with_the_rows() -> None:
    app = Flask("page")
    app.add_url_rule("/stats/requests", "stats", lambda: {"state": "running"})
    app.add_url_rule("/other", "other", lambda: {"state": "running"})
    ledger = Ledger()
    ledger.begin(0.0)
    ledger.end(Outcome("chat, whole", e2e_s=1.0, tokens=30), Objective(ttft_s=1.0, itl_s=0.05), 2.0)
    page: Any = SimpleNamespace(app=app, template_args={"kept": 1})
    report.add_web_tab(page, ledger)
    (table,) = page.template_args["extended_tables"]
    assert page.template_args["kept"] == 1
    assert [column["key"] for column in table["structure"]] == list(report.COLUMNS)

    client = app.test_client()
    said = client.get("/stats/requests").get_json()
    assert said == {
        "state": "running",
        "extended_stats": [{"key": table["key"], "data": report.rows(ledger)}],
    }
    assert client.get("/other").get_json() == {"state": "running"}
    heads, *lines = client.get(page.template_args["extended_csv_files"][0]["href"]).text.splitlines()
    assert heads.startswith("User,Requests")
    assert lines[0].startswith('"chat, whole",1,0,0')
