"""``simulate``: a table, JSON, a report and a log, and errors that name the cause."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from sim.oracle.offline_optimum import bounds_of
from sim.oracle.replica_capacity import Trials
from tidegate.cli import group
from tidegate.exit_codes import ExitCode, exit_of

DOCUMENT = """
models:
  - name: m
    engine: sim
    sim: {profile: h100-8b, speed: 0.2}
    shapes: {small: {gpus: 1, max_in_flight: 64}}
    modes: {multi-replica: {shape: small, replicas: {min: 1, max: 4}}}
    control:
      policy: {target_tracking: {metric: concurrency, target: 1}}
      slo: {ttft_p95_s: 2.0}
      assumed_start_s: 5
budget: {gpus: 4, gpu_cost_per_h: 2}
"""
WORKLOAD = """
duration_s: 60
mix:
  - generate:
      arrivals: {rate: 1.5}
      input_tokens: 200
      output_tokens: 60
"""
SPEC = "engine: sim, shapes: {s: {cpus: 1}}, modes: {multi-replica: {shape: s}}"
TWO = f"models: [{{name: m, {SPEC}}}, {{name: n, {SPEC}}}]"
KEYS = ["attainment", "gpu_hours", "oracle_ratio", "ttft_p50_s", "ttft_p99_s", "itl_p95_s", "goodput_rps",
        "switches", "requests", "failed"]  # fmt: skip


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "deployment.yaml").write_text(DOCUMENT)
    (tmp_path / "load.yaml").write_text(WORKLOAD)
    return tmp_path


def run(site: Path, *words: str, trace: str = "load.yaml", document: str = "deployment.yaml") -> Result:
    words = ("simulate", str(site / document), "--trace", str(site / trace), *words)
    return CliRunner().invoke(group, list(words))


def refused(site: Path, *words: str, trace: str = "load.yaml", document: str = "deployment.yaml") -> str:
    error = run(site, *words, trace=trace, document=document).exception
    assert error is not None and exit_of(error) is ExitCode.INVALID
    return str(error)


@pytest.mark.slow
def test_the_json_has_exactly_the_documented_keys_and_is_deterministic(site: Path) -> None:
    words = ("--compare", "predictive,static", "--seed", "3", "--json", "--no-oracle")
    result = run(site, *words)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert list(document) == ["trace", "seed", "oracle", "policies"]
    assert (document["trace"], document["seed"]) == ("load.yaml", 3)
    assert document["oracle"] == {"lower_gpu_hours": None, "achievable_gpu_hours": None}
    assert list(document["policies"]) == ["predictive", "static"]
    for each in document["policies"].values():
        assert set(KEYS) <= set(each) and each["oracle_ratio"] is None
        assert 0 < each["attainment"] <= 1 and each["gpu_hours"] > 0 and each["cost"] == 2 * each["gpu_hours"]
    requests = {each["requests"] for each in document["policies"].values()}
    assert len(requests) == 1 and 50 < requests.pop() < 140
    assert re.search(r"^predictive: 0:00:5\d simulated$", result.stderr, re.MULTILINE)
    assert run(site, *words).stdout == result.stdout


@pytest.mark.slow
def test_the_lower_bounds_are_below_the_cost_of_a_policy(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = partial(bounds_of, trials=Trials(requests=200, lasts_s=1.0))
    monkeypatch.setattr("tidegate.commands.simulation.simulate.bounds_of", short)
    result = run(site, "--json")
    document = json.loads(result.stdout)
    oracle, (policy,) = document["oracle"], document["policies"].values()
    assert 0 < oracle["lower_gpu_hours"] <= oracle["achievable_gpu_hours"]
    assert policy["oracle_ratio"] == pytest.approx(policy["gpu_hours"] / oracle["lower_gpu_hours"])
    assert "what a replica of multi-replica attains" in result.stderr


@pytest.mark.slow
def test_simulate_prints_a_table_and_writes_a_report_a_chart_and_a_log(site: Path) -> None:
    files = ("--report", str(site / "r.html"), "--plot", str(site / "c.svg"), "--log", str(site / "d.jsonl"))
    result = run(site, *files, "--rate", "3", "--no-oracle")
    assert result.exit_code == 0, result.output
    shown = (
        "load.yaml, seed 0; no bounds: not computed",
        "target_tracking",
        "attainment",
        "GPU-hours",
        "r.html",
        "Chart written to",
    )
    assert all(words in result.stdout for words in shown)
    text = (site / "r.html").read_text()
    assert ElementTree.fromstring(text).findtext(".//h2") == "target_tracking"  # noqa: S314 - written above
    chart = (site / "c.svg").read_text()
    titles = ("m: requests/s", "ready replicas", "TTFT at p90", "% within the SLO", "target_tracking: ")
    assert all(title in chart for title in titles) and "ITL" not in chart
    lines = [json.loads(line) for line in (site / "d.jsonl").read_text().splitlines()]
    assert lines and all(list(line) == ["policy", "at", "decision"] for line in lines)
    assert lines[0]["decision"]["reason"] and lines[0]["policy"] == "target_tracking"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [("--report",), ("--log",), ("--json", "--report"), ("--json", "--log"), ("--plot",)]
)
def test_the_result_is_printed_if_a_file_cannot_be_written(site: Path, words: tuple[str, ...]) -> None:
    result = run(site, "--no-oracle", "--rate", "3", *words, "/dev/full")
    assert result.exit_code == ExitCode.FAILED and not isinstance(result.exception, OSError)
    assert "/dev/full: No space left on device" in result.stderr
    if "--json" in words:
        assert json.loads(result.stdout)["policies"]["target_tracking"]["requests"] > 50
    else:
        assert "attainment" in result.stdout and "Report written" not in result.stdout


@pytest.mark.parametrize("option", ["--report", "--log"])
def test_unwritable_files_are_refused_first(site: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != site)
    result = run(site, option, str(site / "out"))
    assert result.exit_code == ExitCode.USAGE and "expected a file that can be written" in result.stderr


def test_notes_on_a_trace_are_reported_once(site: Path) -> None:
    rows = ["Timestamp,Model,Request tokens,Response tokens"]
    rows += [f"{i},m,9,{i % 2 * 5}" for i in range(4)]
    (site / "mine.csv").write_text("\n".join(rows))
    (site / "mix.yaml").write_text("mix: [{trace: {path: mine.csv}}, {trace: {path: mine.csv}}]")
    for trace in ("mine.csv", "mix.yaml"):
        result = run(site, "--json", "--no-oracle", "--compare", "static,target_tracking", trace=trace)
        assert result.exit_code == 0, result.exception
        assert result.stderr.count("mine.csv: 2 of 4 rows are failed requests, left out\n") == 1
        assert result.stderr.count("mine.csv:5: the last line has no line end") == 1


def names(site: Path, *words: str) -> list[str]:
    result = run(site, "--json", "--no-oracle", "--to-s", "2", *words)
    assert result.exit_code == 0, result.exception
    return list(json.loads(result.stdout)["policies"])


def test_policies_are_named_as_written(site: Path) -> None:
    assert names(site) == ["target_tracking"]
    assert names(site, "--policy", "predictive: {quantile: 0.8}") == ["predictive"]
    several = "predictive: {quantile: 0.8}, predictive, panic_window"
    assert names(site, "--compare", several) == ['predictive {"quantile":0.8}', "predictive", "panic_window"]
    assert names(site, "--policy", "static", "--compare", "target_tracking") == ["static", "target_tracking"]


@pytest.mark.slow
def test_a_scenario_with_slow_starts_lowers_the_attainment(site: Path) -> None:
    (site / "scenario.yaml").write_text("cold_s: 300\ncached_s: 300\n")
    # The burst comes after the first minute, which decides the initial replica count.
    burst = WORKLOAD.replace("{rate: 1.5}", "{rate: 1.5, flashes: [{at_s: 80, factor: 15, hold_s: 60}]}")
    (site / "burst.yaml").write_text(burst.replace("duration_s: 60", "duration_s: 150"))

    def attained(*words: str) -> float:
        document = json.loads(run(site, "--json", "--no-oracle", *words, trace="burst.yaml").stdout)
        return float(document["policies"]["target_tracking"]["attainment"])

    assert attained("--scenario", str(site / "scenario.yaml")) < attained()


def test_requests_for_adapters_without_a_section_fail_with_a_warning(site: Path) -> None:
    (site / "sql.yaml").write_text(WORKLOAD + "      adapters: {names: [sql]}\n")
    result = run(site, "--json", "--no-oracle", trace="sql.yaml")
    policy = json.loads(result.stdout)["policies"]["target_tracking"]
    message = f"m: {policy['requests']} of {policy['requests']} requests name an adapter and fail"
    assert policy["failed"] == policy["requests"] and message in result.stderr


def test_requests_that_are_too_long_fail_with_a_warning(site: Path) -> None:
    short = DOCUMENT.replace("engine: sim", "engine: sim\n    engine_args: {max_model_len: 259}")
    (site / "short.yaml").write_text(short)
    result = run(site, "--json", "--no-oracle", document="short.yaml")
    policy = json.loads(result.stdout)["policies"]["target_tracking"]
    reported = f"m: {policy['requests']} of {policy['requests']} requests exceed max_model_len"
    assert policy["failed"] == policy["requests"]
    assert f"{reported} (259 tokens with their answers) and fail" in result.stderr
    (site / "short.yaml").write_text(short.replace("259", "260"))
    result = run(site, "--json", "--no-oracle", document="short.yaml")
    assert json.loads(result.stdout)["policies"]["target_tracking"]["failed"] == 0
    assert "max_model_len" not in result.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--policy", "predictve"), "did you mean 'predictive'?"),
        (("--policy", "predictive: {quantile: 2}"), "quantile: got 2, expected"),
        (("--policy", "{"), "--policy: got '{', expected policies as in the deployment file"),
        (("--policy", "3"), "--policy: got 3, expected the name of a policy"),
        (("--compare", ""), "--compare: got '', expected policies"),
        (("--compare", "static,static"), "got 'static', expected each policy once"),
        (("--from-s", "61"), "got 'no request', expected at least one request"),
    ],
)
def test_invalid_policies_and_slices_are_refused(site: Path, words: tuple[str, ...], expected: str) -> None:
    assert expected in refused(site, *words)


def test_errors_in_files_name_the_line_or_key(site: Path) -> None:
    os.mkfifo(site / "pipe")
    assert "read several times" in refused(site, trace="pipe")
    (site / "scenario.yaml").write_text("cold_s: -1\n")
    assert f"{site / 'scenario.yaml'}: cold_s: got -1" in refused(
        site, "--scenario", str(site / "scenario.yaml")
    )
    (site / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-01-01 00:00:00,1,x\n")
    assert "bad.csv:2: got 'x'" in refused(site, trace="bad.csv")
    named = WORKLOAD.replace("  - generate", "  - model: other\n    generate")
    (site / "named.yaml").write_text(named)
    (site / "two.yaml").write_text(TWO)
    message = refused(site, document="two.yaml", trace="named.yaml")
    assert "the trace's model: got 'other', expected one of: m, n" in message
    (site / "external.yaml").write_text("models: [{name: m, engine: external, urls: ['http://127.0.0.1:1']}]")
    assert "models[m].engine: got 'external'" in refused(site, document="external.yaml")


def test_a_file_of_another_kind_is_named(site: Path) -> None:
    (site / "stored.json").write_text('{"models": []}')
    deployment = "deployment.yaml: got 'a deployment file', expected "
    assert f"{deployment}a workload or a trace" in refused(site, trace="deployment.yaml")
    assert "got 'a deployment file', expected a trace or a workload" in refused(site, trace="stored.json")
    assert f"{deployment}a mapping with" in refused(site, "--scenario", str(site / "deployment.yaml"))
    workload = "load.yaml: got 'a workload or a trace', expected a deployment file"
    assert workload in refused(site, document="load.yaml")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(("--rate 0", "1e-06<=x<=1000000"), ("--to-s 0", "is not after --from-s")),
        *((f"--{option} /nowhere/a", "a folder that exists") for option in ("report", "log")),
        ("--scenario /nowhere.yaml", "does not exist"),
    ],
)
def test_an_option_out_of_range_names_the_range(site: Path, words: str, expected: str) -> None:
    result = run(site, *words.split())
    assert result.exit_code == 2 and words.split(maxsplit=1)[0] in result.stderr and expected in result.stderr
