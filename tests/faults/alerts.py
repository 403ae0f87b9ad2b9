"""Whether the alert rules name a fault: promtool evaluates them on what was scraped before and during it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.observability.test_alerts_and_dashboards import ALERTS

_SAMPLE = re.compile(r"^(tidegate_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_TARGET = 'job="tidegate",instance="g"'
# Minutes before the fault, and of it.
_BEFORE, _DURING = 40, 40


def raises(folder: Path, alert: str, before: str, during: str, **labels: str) -> None:
    """Assert that the fault raises ``alert`` with these ``labels``, and that nothing did before it.

    ``before`` and ``during`` are texts of two scrapes. The fault goes on for 40 minutes: gauges keep their
    value, and counters grow by so much each minute. Without promtool nothing is asserted.
    """
    program = shutil.which("promtool")
    if program is None:
        return
    document = yaml.safe_load(ALERTS.read_text())
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    for rule in rules:
        rule.pop("annotations", None)  # promtool would compare their text
    (rule,) = (rule for rule in rules if rule.get("alert") == alert)
    expected = {"exp_labels": {**rule["labels"], **labels}}
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": _series(before, during, rule["expr"]),
        "alert_rule_test": [
            {"eval_time": f"{_BEFORE - 1}m", "alertname": alert, "exp_alerts": []},
            {"eval_time": f"{_BEFORE + _DURING}m", "alertname": alert, "exp_alerts": [expected]},
        ],
    }
    (folder / "rules.yaml").write_text(yaml.safe_dump(document))
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [test]}))
    ran = subprocess.run([program, "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def _series(before: str, during: str, expression: str) -> list[dict[str, str]]:
    """The series of ``expression`` in promtool's notation."""
    was = {(name, labels): float(value) for name, labels, value in _SAMPLE.findall(before)}
    found = []
    for name, labels, text in _SAMPLE.findall(during):
        if name in expression:
            value = float(text)
            first = was.get((name, labels), 0.0)
            counts = name.endswith("_total")
            step = value - first if counts else 0.0
            values = f"{first}x{_BEFORE - 1} {value}{f'+{step}' if counts else ''}x{_DURING}"
            inside = f"{labels},{_TARGET}" if labels else _TARGET
            found.append({"series": f"{name}{{{inside}}}", "values": values})
    return found
