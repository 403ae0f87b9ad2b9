"""``plan``: tables, JSON, and errors that name the option."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tidegate.cli import group

DOCUMENT = """
models:
  - name: chat
    engine: sim
    sim: {profile: h100-8b}
    shapes: {small: {gpus: 1}}
    modes: {multi-replica: {shape: small, replicas: {min: 1, max: 8}}}
    control: {slo: {ttft_p95_s: 1.0, itl_p95_s: 0.03}, assumed_start_s: 10}
"""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{46 + i // 10}.{i % 10}000000,400,30\n" for i in range(100)
)
SMALL = ("--kinds", "h100", "--shapes", "1", "--growth", "2", "--minutes", "1")


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "deployment.yaml"
    path.write_text(DOCUMENT)
    return path


def run(document: Path, *words: str) -> Result:
    return CliRunner().invoke(group, ["plan", str(document), *words])


@pytest.mark.slow
def test_the_json_has_the_documented_keys(document: Path, tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(TRACE)
    result = run(document, "--trace", str(trace), *SMALL, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["model"] == "chat" and content["load"] == "azure.csv"
    (option,) = content["options"]
    assert (option["kind"], option["replicas"], option["with_spare"]) == ("h100", 1, 2)
    assert option["basis"] == "assumed" and "data sheet" in option["source"]
    assert [each["factor"] for each in content["growth"]] == [1.0, 2.0]
    assert content["basis"]["load"].startswith("measured: counted in the requests")
    assert content["demand"]["requests"] == 100 and content["demand"]["input_tokens"] == 400
    for part in ("failure", "power", "network"):
        assert all(value is not None for value in content[part].values())
    assert "try 1: 1 of h100 x 1" in result.stderr
    load, slo, candidate, growth, *rest = result.stderr.splitlines()
    assert load.startswith("chat, azure.csv, seed 0: 100 requests in 10 s")
    assert slo == "SLO: TTFT p95 1.00 s and ITL p95 30 ms for 99.0% of requests"
    assert candidate.startswith("h100: 1 per replica; step times assumed: ")
    assert growth == "Load x 1, 2; 1 spare; a failed replica is back after 10 s (assumed_start_s)"
    assert any(re.fullmatch(r"Estimate: .* s for about 9 simulations of .* s\.", line) for line in rest)


@pytest.mark.slow
def test_tables_show_the_basis_of_each_number(document: Path) -> None:
    more = "--price h100=2.5 --upstream-price 0.5,1.5 --growth-per-month 10% --module 2"
    result = run(document, *f"--rps 4 --input 500 --output 40 {more}".split(), *SMALL)
    assert result.exit_code == 0, result.output
    for words in (
        "Fewest GPUs of each type, best first by cost",
        "1 replica with 1 x h100 each, and 1 spare",
        "Purchase schedule",
        "Fewer replicas, with spillover to a fallback provider",
        "J per input or output token",
        "BTU/h",
        "in each direction",
        "assumed: as described",
        "assumed: data sheets: 700 W a card",
    ):
        assert words in result.stdout
    assert result.output.count("chat, 4 requests/s, cv 1, seed 0") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("more", "l4_cost"), [("", None), ("--price l4=0.5", 0.5)])
def test_the_price_of_the_budget_is_that_of_the_own_gpu_type(
    document: Path, more: str, l4_cost: float | None
) -> None:
    document.write_text(DOCUMENT.replace("0.03", "0.3") + "budget: {gpus: 8, gpu_cost_per_h: 2.5}\n")
    words = f"--rps 0.2 --input 100 --output 20 --kinds h100,l4 --shapes 1 --minutes 1 --growth 2 {more}"
    result = run(document, *words.split(), "--json")
    assert result.exit_code == 0, result.output
    costs = {each["kind"]: each["cost_per_h"] for each in json.loads(result.stdout)["options"]}
    assert costs == {"h100": 2.5, "l4": l4_cost}


@pytest.mark.slow
def test_an_slo_that_no_replica_count_meets_is_reported(document: Path) -> None:
    document.write_text(DOCUMENT.replace("0.03", "0.0001"))
    result = run(document, "--rps", "2", *SMALL, "--max-replicas", "20")
    assert result.exit_code == 0 and "none up to 20" in result.stdout
    assert "best first by number of GPUs" in result.stdout
    assert "No replica count up to 20 of any GPU type meets the SLO." in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *(("", "give either --trace, or --rps"), ("--rps 0", "--rps"), ("--rps 2 --shapes one", "--shapes")),
        ("--rps 2 --kinds b300", "--kinds: got 'b300'"),
        *(("--rps 2 --growth 0.5", "--growth"), ("--rps 2 --growth x", "--growth")),
        *(("--rps 2 --price b300=1", "--price"), ("--rps 2 --price h100=much", "much")),
        ("--rps 2 --upstream-price 1", "--upstream-price"),
        ("--rps 2 --model other", "no model is called 'other'"),
    ],
)
def test_errors_name_the_option(document: Path, words: str, message: str) -> None:
    result = run(document, *words.split())
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)


def test_a_model_without_an_slo_is_refused(document: Path) -> None:
    document.write_text(DOCUMENT.replace("{ttft_p95_s: 1.0, itl_p95_s: 0.03}", "{}"))
    result = run(document, "--rps", "2")
    assert "models[chat].control.slo" in str(result.exception)


def test_notes_on_a_trace_are_reported(document: Path, tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(TRACE.removesuffix("0\n"))
    result = run(document, "--trace", str(trace), "--price", "none=1")
    assert "azure.csv:101: the last line has no line end" in result.stderr
    assert "names no GPU type that is considered" in result.stderr
