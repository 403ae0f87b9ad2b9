"""Alert rules and dashboards: every expression is valid and finds its series; faults raise their alerts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from policy.wire.metric_definitions import ADAPTERS, CONTROL, METRICS, PROCESSES, REPLICAS, MetricType
from serve.engine.interface import EngineStats
from serve.engine.sim.metrics import SimEngineMetrics as SimMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments" / "observability"
ALERTS = FOLDER / "alerts.yaml"
FAULTS = Path(__file__).parent / "alert_tests.yaml"
RUNBOOK = ROOT / "docs" / "runbook.md"
DASHBOARDS = {
    path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "dashboards").glob("*.json"))
}
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
NAMES = [rule["alert"] for rule in RULES if "alert" in rule]
# What Grafana puts in.
VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}
# Labels that Prometheus adds.
TARGET = {"job", "instance"}
_SUFFIXES = {
    MetricType.COUNTER: ("_total",),
    MetricType.GAUGE: ("",),
    MetricType.HISTOGRAM: ("_bucket", "_sum", "_count"),
}
_SERIES = re.compile(r"\b((?:tidegate|gen_ai|vllm)[_:][a-z0-9_:]+)(?:\{([^}]*)\})?")
# What is added up as it is scraped, or as the rate of that.
_SUMMED = re.compile(r"\bsum by \([^)]*\) \((?:\w+\()?(tidegate_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def expressions() -> dict[str, str]:
    """Every expression by its place."""
    found = {
        f"{name}: {panel['title']} {target['refId']}": target["expr"]
        for name, board in DASHBOARDS.items()
        for panel in board["panels"]
        for target in panel["targets"]
    }
    return found | {rule.get("alert") or rule["record"]: rule["expr"] for rule in RULES}


def documented() -> dict[str, set[str]]:
    """The labels of every series by its name."""
    series = {
        metric.name + suffix: set(metric.labels) | ({"le"} if suffix == "_bucket" else set()) | TARGET
        for metric in METRICS.values()
        for suffix in _SUFFIXES[metric.kind]
    }
    engine = SimMetrics("m")
    engine.watch(lambda: EngineStats(running=0, waiting=0, kv_used=0.0))
    for name in re.findall(r"^(vllm:\w+)[{ ]", engine.exposition().decode(), re.MULTILINE):
        series[name] = {"replica", "model_name", "le"} | TARGET
    return series | {rule["record"]: {"model"} for rule in RULES if "record" in rule}


SERIES = documented()


@pytest.mark.parametrize("expression", expressions().values(), ids=expressions().keys())
def test_an_expression_finds_its_series(expression: str) -> None:
    used = _SERIES.findall(re.sub(r"\b(?:by|on) \([^)]*\)", "", expression))  # without lists of labels
    assert used or "up{" in expression
    for name, matchers in used:
        assert set(_MATCHER.findall(matchers)) <= SERIES[name], name
    grouped = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
    assert grouped <= set().union(*(SERIES[name] for name, _ in used))


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_has_its_own_id_and_no_panels_that_overlap(name: str) -> None:
    board = DASHBOARDS[name]
    assert board["uid"] == f"tidegate-{name}"
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in board["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert {variable["name"] for variable in board["templating"]["list"]} >= {"datasource"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_adds_up_no_sample_that_each_gateway_repeats(name: str) -> None:
    repeated = {metric.name for metric in (*CONTROL, *REPLICAS, *ADAPTERS)}
    processes = {metric.name for metric in PROCESSES if "process" in metric.labels}
    for panel in DASHBOARDS[name]["panels"]:
        for target in panel["targets"]:
            for series, matchers in _SUMMED.findall(target["expr"]):
                metric = series.removesuffix("_total")
                assert metric not in repeated, panel["title"]
                assert metric not in processes or 'process!="controller"' in matchers, panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_curve_of_seconds_has_the_unit(name: str) -> None:
    for panel in DASHBOARDS[name]["panels"]:
        config = panel["fieldConfig"]
        units = {
            override["matcher"]["options"]: each["value"]
            for override in config["overrides"]
            for each in override["properties"]
            if each["id"] == "unit"
        }
        legends = {target["legendFormat"] for target in panel["targets"]}
        assert units.keys() <= legends, panel["title"]
        for legend in legends:
            if "seconds" in legend:
                assert units.get(legend, config["defaults"]["unit"]) == "s", panel["title"]


def test_each_alert_has_a_section_of_the_runbook_and_links_to_it() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert headings == NAMES
    for rule in RULES:
        if "alert" in rule:
            assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
            assert rule["labels"]["severity"] in ("page", "ticket")


def test_compose_mounts_files_that_exist() -> None:
    services = yaml.safe_load((FOLDER / "docker-compose.yaml").read_text())["services"]
    assert services.keys() == {"prometheus", "grafana", "collector", "jaeger"}
    for service in services.values():
        for volume in service.get("volumes", ()):
            source, _, _ = volume.partition(":")
            assert not source.startswith(".") or (FOLDER / source).exists()
    board = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (FOLDER / "dashboards" / Path(board).name).exists()


def test_traces_reach_the_store_that_exemplars_link_to() -> None:
    collector = yaml.safe_load((FOLDER / "collector.yaml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for part in ("receivers", "processors", "exporters"):
            assert set(pipeline[part]) <= collector[part].keys()
    taken = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert f"http://{taken}" in (ROOT / "docs" / "tracing.md").read_text()
    (exporter,) = collector["service"]["pipelines"]["traces"]["exporters"]
    store = yaml.safe_load((FOLDER / "docker-compose.yaml").read_text())["services"]["jaeger"]
    published = dict(port.rsplit(":", 1) for port in store["ports"])
    assert published[collector["exporters"][exporter]["endpoint"]] == "4317"
    prometheus, jaeger = yaml.safe_load((FOLDER / "grafana-datasource.yaml").read_text())["datasources"]
    (link,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert (link["name"], link["datasourceUid"]) == ("trace_id", jaeger["uid"])
    assert jaeger["url"].removeprefix("http://") in published


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_configuration() -> None:
    promtool("check", "config", str(FOLDER / "prometheus.yaml"))


def test_promtool_parses_the_expressions_of_the_dashboards(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = []
    for i, expression in enumerate(expressions().values()):
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)  # noqa: PLW2901
        rules.append({"record": f"expression:{i}", "expr": expression})
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "rules.yaml"))


def test_each_fault_raises_its_alert(tmp_path: Path) -> None:
    document = yaml.safe_load(ALERTS.read_text())
    for group in document["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)  # promtool would compare their text
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(document))
    shutil.copy(FAULTS, tmp_path)
    promtool("test", "rules", str(tmp_path / FAULTS.name))


def test_every_alert_has_a_fault() -> None:
    tests = yaml.safe_load(FAULTS.read_text())["tests"]
    raised = {each["alertname"] for test in tests for each in test["alert_rule_test"] if each["exp_alerts"]}
    assert raised == set(NAMES)
