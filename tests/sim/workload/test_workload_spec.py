"""The workload file: the requests it generates, and its errors."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.errors import ConfigError, TraceError
from policy.wire.capture import HEADER
from sim.arrivals import Arrival
from sim.workload.traces.detect_format import open_trace
from sim.workload.traces.formats import captured
from sim.workload.workload_spec import arrivals_of, parse_workload, read_workload

ROOT = Path(__file__).parents[3]
SHIPPED = sorted((ROOT / "deployments" / "workloads").glob("*.yaml"))
MADE = Path(__file__).parents[1] / "data"

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:40,100,10
2023-11-16 18:15:44,200,20
2023-11-16 18:15:48,300,30
"""
BURST = "Timestamp,Model,Request tokens,Response tokens\n0,GPT-4,1,1\n1,ChatGPT,2,2\n2,GPT-4,3,3\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "azure.csv").write_text(TRACE)
    (tmp_path / "burst.csv").write_text(BURST)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "workload.yaml"
    path.write_text(text)
    return path


def test_traces_are_sliced_scaled_named_and_mixed(folder: Path) -> None:
    path = write(
        folder,
        """
mix:
  - {trace: {path: azure.csv, from_s: 4, to_s: 9, rate: 2, input_scale: 0.5, output_scale: 3}, tenant: t}
  - {trace: {path: burst.csv, only_model: GPT-4}, model: large}
""",
    )
    assert list(arrivals_of(path, 1)) == [
        Arrival(0.0, 100, 60, tenant="t"),
        Arrival(0.0, 1, 1, "large"),
        Arrival(2.0, 150, 90, tenant="t"),
        Arrival(2.0, 3, 3, "large"),
    ]
    assert [each.at for each in arrivals_of(path, 1, rate=4.0)] == [0.0, 0.0, 0.5, 0.5]
    assert read_workload(path).duration_s is None


def test_a_trace_file_is_a_workload(folder: Path) -> None:
    assert [each.at for each in arrivals_of(folder / "azure.csv", 1, rate=2.0)] == [0.0, 2.0, 4.0]
    assert list(arrivals_of(folder / "azure.csv", 1)) == list(open_trace(folder / "azure.csv"))


def test_generated_requests_depend_on_the_seed_and_end(folder: Path) -> None:
    path = write(
        folder,
        """
duration_s: 6
mix:
  - generate: {arrivals: {rate: 20}, input_tokens: {trace: azure.csv}, output_tokens: 7}
  - generate: {arrivals: {rate: 20}, input_tokens: {trace: azure.csv}, output_tokens: {trace: azure.csv}}
  - trace: {path: azure.csv}
""",
    )
    made = list(arrivals_of(path, 1))
    assert made == list(arrivals_of(path, 1)) != list(arrivals_of(path, 2))
    assert made[-1].at < 6.0 == read_workload(path).duration_s
    assert {each.input_tokens for each in made} == {100, 200, 300}
    assert {each.output_tokens for each in made} == {7, 10, 20, 30}
    instants = [{each.at for each in made if (each.output_tokens == 7) is first} for first in (True, False)]
    assert not instants[0] & instants[1], "two sources of one file come at different instants"


GENERATE: dict[str, Any] = {"arrivals": {"rate": 1}, "input_tokens": 1, "output_tokens": 1}


@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        ({"mix": []}, "mix", "at least one source"),
        ({"duration_s": 1}, "mix", "required"),
        ({"mix": [{}]}, "mix[0]", "trace or generate"),
        ({"duration_s": 1, "mix": [{"trace": {"path": "a"}, "generate": GENERATE}]}, "mix[0]", "one of them"),
        ({"mix": [{"trace": {"path": "a"}}, {"generate": GENERATE}]}, "duration_s", "mix[1].generate has no"),
        ({"mix": [{"trace": {"path": "a", "rat": 2}}]}, "mix[0].trace.rat", "did you mean 'rate'"),
        ({"mix": [{"trace": {"path": "a", "rate": 0}}]}, "mix[0].trace.rate", "> 0"),
        (
            {"mix": [{"trace": {"path": "a", "from_s": 2, "to_s": 2}}]},
            "mix[0].trace.to_s",
            "more than from_s",
        ),
        ({"duration_s": -1, "mix": [{"generate": GENERATE}]}, "duration_s", "> 0"),
        *(
            ({"duration_s": 1, "mix": [{"generate": {**GENERATE, **more}}]}, f"mix[0].generate.{path}", text)
            for more, path, text in (
                ({"arrivals": {}}, "arrivals.rate", "required"),
                ({"input_tokens": {"p50": 3, "p99": 2}}, "input_tokens.p99", "at least p50 = 3"),
                *(
                    ({"output_tokens": length}, "output_tokens", "p50 and p99")
                    for length in (
                        {},
                        {"p50": 1},
                        {"p99": 1},
                        {"p50": 1, "trace": "a"},
                        {"p99": 1, "trace": "a"},
                    )
                ),
                *(
                    ({"adapters": adapters}, "adapters.count", "at least 1 or names")
                    for adapters in ({}, {"names": ["a"], "count": 1})
                ),
                (
                    {"conversations": {"system_tokens": 99_999}},
                    "conversations.system_tokens",
                    "at most max_tokens",
                ),
            )
        ),
    ],
)
def test_an_invalid_workload_names_its_path(document: dict[str, Any], path: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_workload(document, Path())
    assert caught.value.path == path and expected in caught.value.expected


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ("trace: {path: none.csv}", "trace.path"),
        (
            "generate: {arrivals: {rate: 1}, input_tokens: 1, output_tokens: {trace: none.csv}}",
            "generate.output_tokens.trace",
        ),
    ],
)
def test_a_missing_trace_is_named_with_the_workload_file(folder: Path, source: str, key: str) -> None:
    path = write(folder, f"duration_s: 9\nmix:\n- {source}\n")
    with pytest.raises(ConfigError, match="a file that exists") as caught:
        read_workload(path)
    assert caught.value.path == f"{path}: mix[0].{key}"


def test_an_error_in_a_trace_of_a_workload_names_its_line(folder: Path) -> None:
    (folder / "azure.csv").write_text(TRACE + "half")
    with pytest.raises(TraceError, match=r"azure.csv:5: got 'half'"):
        list(arrivals_of(write(folder, "mix:\n- trace: {path: azure.csv}\n"), 1))


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_workloads_generate_their_named_load(path: Path) -> None:
    workload = read_workload(path)
    made = list(arrivals_of(path, 1))
    assert workload.duration_s is not None and made[-1].at < workload.duration_s
    assert made[-1].at > 0.9 * workload.duration_s and 1000 < len(made) < 70_000
    assert all(one.at <= other.at for one, other in pairwise(made))
    assert bool({each.adapter for each in made} - {""}) == (path.stem == "adapters")
    assert any(each.blocks for each in made) == (path.stem in ("agents", "multi-turn"))


def test_the_stored_trace_is_what_its_workload_generates() -> None:
    made = list(arrivals_of(MADE / "made.yaml", 7))
    first = made[0].at
    lines = [msgspec.structs.replace(captured(each), at=round(each.at - first, 3)) for each in made]
    assert (MADE / "made.jsonl").read_bytes() == b"".join(
        msgspec.json.encode(each) + b"\n" for each in (HEADER, *lines)
    )
