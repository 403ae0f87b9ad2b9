"""``bench`` of adapters, agents, modes and policies: tables, charts, JSON and errors."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from rich.console import Console

from policy.deployment_file.parse import parse
from policy.scaling.policies.registry import NAMES
from sim.benchmarks.policies.gpu_time_ranking import OracleCosts, Ranking, RankingTable, Regret
from sim.benchmarks.policies.sizing import ReplicaAtCapacity, ReplicaSize
from sim.workload.workload_spec import read_workload
from tidegate.cli import group
from tidegate.commands.simulation import bench
from tidegate.exit_codes import ExitCode, exit_of
from tidegate.supervisor.children import ROOT

SMALL = ["--adapters", "30", "--replicas", "2", "--slots", "4", "--requests", "120", "--rate", "50"]
DOCUMENT = """
models:
  - name: m
    engine: sim
    sim: {profile: h100-8b, wake_s: 1}
    shapes:
      large: {gpus: 2, tensor_parallel: 2}
      small: {gpus: 1}
    modes:
      single-large: {shape: large}
      multi-replica: {shape: small, replicas: {min: 1, max: 2}}
    control: {slo: {ttft_p95_s: 2.0}}
budget: {gpus: 2}
"""
WORKLOAD = """
duration_s: 20
mix:
  - generate: {arrivals: {rate: 1.5}, input_tokens: 200, output_tokens: 20}
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "deployment.yaml").write_text(DOCUMENT)
    (tmp_path / "load.yaml").write_text(WORKLOAD)
    return tmp_path


def run(*words: str) -> Result:
    return CliRunner().invoke(group, ["bench", *words])


def run_modes(site: Path, *words: str, trace: str = "load.yaml") -> Result:
    return run("modes", str(site / "deployment.yaml"), "--trace", str(site / trace), *words)


def test_bench_adapters_prints_json() -> None:
    result = run("adapters", *SMALL, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert list(document) == ["policies"]
    assert list(document["policies"]) == ["placement", "least_loaded", "serve_multiplex"]
    for each in document["policies"].values():
        assert list(each) == ["loads", "ttft_p95_s", "load_max_over_mean", "moves_per_min"]
        assert all(isinstance(value, int | float) for value in each.values())
    assert "placement: 120 requests" in result.stderr


def test_bench_adapters_prints_a_table_and_writes_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "adapters.svg"
    result = run("adapters", *SMALL, "--plot", str(plot))
    assert result.exit_code == 0 and str(plot) in result.stdout.replace("\n", "")
    title = "30 adapters, Zipf exponent 1, 2 replicas x 4 slots, 50 requests/s"
    assert all(words in result.stdout for words in (title, "serve_multiplex", "TTFT p95"))
    assert "<svg" in plot.read_text() and "serve multiplex" in plot.read_text()


AGENTS = ["--loads", "0.5", "--caches", "1.5", "--routers", "tidegate,round_robin", "--replicas", "1",
          "--duration", "1500", "--processes", "1"]  # fmt: skip


@pytest.mark.slow
def test_bench_agents_prints_json() -> None:
    result = run("agents", *AGENTS, "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert {name: document[name] for name in ("replicas", "duration_s", "seeds")} == {
        "replicas": 1, "duration_s": 1500, "seeds": 1,
    }  # fmt: skip
    (cell,) = document["cells"]
    assert list(cell["routers"]) == ["tidegate", "round_robin"]
    ours, other = cell["routers"].values()
    assert ours["requests"] == other["requests"] > 0
    assert ours["computed_twice"] == other["computed_twice"]  # there is one replica


@pytest.mark.slow
def test_bench_agents_prints_a_table_and_writes_a_plot(tmp_path: Path) -> None:
    plot = tmp_path / "agents.svg"
    result = run("agents", *AGENTS, "--plot", str(plot))
    assert result.exit_code == 0 and str(plot) in result.stdout.replace("\n", "")
    assert all(words in result.stdout for words in ("load 0.5, cache 1.5", "round_robin", "computed twice"))
    assert "<svg" in plot.read_text() and "round robin" in plot.read_text()


def test_bench_agents_refuses_an_unknown_router() -> None:
    result = run("agents", "--routers", "fastest")
    assert result.exit_code == 2 and "weighted_scores" in result.output


def test_bench_modes_prints_json(site: Path) -> None:
    result = run_modes(site, "--seeds", "2", "--seed", "5", "--json")
    assert result.exit_code == 0
    document = json.loads(result.stdout)
    assert list(document) == ["trace", "seeds", "gains", "runs"]
    assert document["trace"] == "load.yaml" and document["seeds"] == [5, 6]
    assert document["gains"] == pytest.approx([0.0, 0.0], abs=0.05), (
        "nothing is to be gained on so small a load"
    )
    assert list(document["runs"]) == ["by_load", "single-large", "multi-replica"]
    for each in document["runs"].values():
        assert list(each) == ["goodput_rps", "attainment", "gpu_hours", "switches", "switches_per_h",
                              "ttft_p95_s", "itl_p95_s", "failed"]  # fmt: skip
        assert all(isinstance(value, int | float) for value in each.values())
    assert result.stderr.count(" simulated") == 3


def test_bench_modes_prints_a_table_and_a_summary_and_writes_a_plot(site: Path) -> None:
    plot = site / "modes.svg"
    result = run_modes(site, "--seeds", "1", "--plot", str(plot))
    assert result.exit_code == 0 and str(plot) in result.stdout.replace("\n", "")
    shown = ("by load", "multi-replica", "goodput/s", "switches/h", "over the best single mode")
    assert all(words in result.stdout for words in (*shown, "1.00x its GPU-hours"))
    assert "<svg" in plot.read_text() and "load.yaml on deployment.yaml" in plot.read_text()


def test_bench_modes_needs_requests_and_two_modes(site: Path) -> None:
    (site / "none.yaml").write_text("mix: [{trace: {path: t.csv, from_s: 5}}]")
    (site / "t.csv").write_text("request_id,timestamp,input_tokens,output_tokens\n1,0,1,1\n")
    error = run_modes(site, trace="none.yaml").exception
    assert error is not None and exit_of(error) is ExitCode.INVALID and "at least one request" in str(error)
    (site / "deployment.yaml").write_text(DOCUMENT.replace("      single-large: {shape: large}\n", ""))
    error = run_modes(site).exception
    assert error is not None and exit_of(error) is ExitCode.INVALID and "two modes at least" in str(error)


def test_the_shipped_crossover_workload_alternates_documents_and_chat() -> None:
    (spec,) = parse(yaml.safe_load((ROOT / "deployments" / "crossover.yaml").read_text())).models
    assert list(spec.modes) == ["single-large", "multi-replica"] and spec.sim.wake_s
    workload = read_workload(ROOT / "deployments" / "workloads" / "crossover.yaml")
    documents, chat = (source.generate for source in workload.spec.mix)
    assert documents is not None and chat is not None
    # The requests of each minute: documents, then chat.
    stretches = [
        "documents" if documents.arrivals.at(at) else "chat"
        for at in range(15, 10_800, 60)
        if bool(documents.arrivals.at(at)) != bool(chat.arrivals.at(at))
    ]
    assert len(stretches) == 180, "never both, and never neither"
    changes = [one for one, other in pairwise(stretches) if one != other]
    assert changes == ["documents", "chat", "documents", "chat"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(("adapters --adapters 0", "1<=x<=100000"), ("adapters --replicas -1", "1<=x<=256")),
        *(("adapters --slots many", "not a valid integer"), ("adapters --exponent 11", "0<=x<=10")),
        *(("adapters --rate nan", "0.001<=x<=100000"), ("adapters --burst-size 0.5", "1<=x<=100")),
        *(
            ("adapters --requests 1000001", "1<=x<=1000000"),
            ("adapters --plot /no/a.svg", "a folder that exists"),
        ),
        *(
            ("policies --start-times 30,x", "seconds above 0 and up to 3600"),
            ("policies --half third", "tuning"),
        ),
        ("policies --start-times 0", "seconds above 0 and up to 3600"),
        *(("policies --policies no", "'no': expected some of static"), ("policies --seeds 0", "1<=x<=100")),
    ],
)
def test_usage_errors_name_the_option_and_what_is_expected(words: str, expected: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    assert words.split()[1] in result.stderr and expected in result.stderr.replace("\n", " ")


def test_a_folder_without_traces_is_named(tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("not a trace")
    result = run("policies", "--traces", str(tmp_path))
    assert result.exit_code != 0
    assert str(tmp_path) in str(result.exception) + result.output


def test_a_trace_that_no_fleet_can_serve_does_not_end_the_others(tmp_path: Path) -> None:
    tokens = [30_000 if i % 20 == 0 else 400 for i in range(1200)]
    rows = "".join(f"2023-11-16 18:{i // 60:02}:{i % 60:02},{tokens[i]},20\n" for i in range(1200))
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    result = run("policies", "--traces", str(tmp_path), "--quick")
    assert result.exit_code != 0
    told = " ".join(result.stderr.split())
    for name, text in (("a", told), ("b", str(result.exception))):
        assert f"{name}.csv: only 95.06% of the requests would be within the SLO" in text


def ranking_of(policy: str) -> Ranking:
    return Ranking(
        lead_s=120.0, policy=policy, gpu_hours=1234.56, oracle_ratio=1.25, least_ratio=11.22,
        most_ratio=11.33, lower_ratio=12.34, dominated=None, setting="", attainment=1.0,
        setting_gpu_hours=1234.56, goodput_per_gpu_hour=12345.0, ttft_p99_s=12.34, recovery_s=1234.0,
        failed=0.0, front=(),
        regret=Regret(forecast_s=1e6, lead_s=1e6, integrality_s=1e6),
    )  # fmt: skip


@pytest.mark.parametrize(("columns", "plan", "shown_plan"), [(100, 5.4, "5.40"), (140, None, "-")])
def test_no_word_of_the_table_of_policies_is_broken(
    columns: int,
    plan: float | None,
    shown_plan: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "console", lambda: Console(highlight=False, markup=False, width=columns))
    oracle = OracleCosts(
        lead_s=120.0, target=0.9881, mu=1.0, lower_gpu_hours=2.13, plan_gpu_hours=plan, gpu_hours=5.31,
        replicas=10.9,
    )  # fmt: skip
    score = bench.PolicyRanking(
        trace="AzureLLMInferenceTrace_conv_2023.csv", half="judge", seeds=5, profile="l4-8b",
        size=ReplicaSize(mu=1.0, factor=0.961, full=ReplicaAtCapacity(at_once=1.0, kv_used=0.5, least=1,
            most=2)),
        table=RankingTable((oracle,), tuple(map(ranking_of, NAMES))),
    )  # fmt: skip
    bench.print_ranking(score, 0.99)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    rows = [line.split() for line in lines]
    for name in NAMES:
        shown = [row[1:] for row in rows if row[:1] == [name]]
        assert shown == [
            ["1234.56", "1.25", "11.22-11.33", "12.34", "277.78", "277.78", "277.78"],
            ["100.00%", "1234.56", "12345", "12.34", "s", "1234", "s"],
        ]
    words = {word for row in rows for word in row}
    assert {"optimum", "bound", "forecast", "start-up", "rounding", "attainment", "recovery"} <= words
    cheapest = f"(cheapest plan {shown_plan}, lower bound 2.13)"
    assert f"offline optimum: 5.31 GPU-hours, 10.9 replicas {cheapest}" in lines
    assert "no run attains 99.00%: all compared at 98.81%" in lines
