"""``tidegate calibrate`` on a simulated engine over HTTP, whose coefficients are known."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from policy.engine.builtin_profiles import profile
from policy.engine.performance_model_file import PerformanceModelFile, encode, model_file
from policy.errors import Unreachable
from tests.policy.engine.test_performance_model_file import made
from tests.tidegate.conftest import Site
from tidegate.cli import group
from tidegate.exit_codes import ExitCode, exit_of

SPEED = 2.0
TRUTH = profile("cpu-smollm2-135m").model.at_degree(2).faster(SPEED)


@pytest.fixture
def sim(site: Site) -> Site:
    """A simulated engine of two cores, with another engine's profile in the deployment file."""
    document = site.shipped("sim.yaml")
    document["gateway"]["workers"] = 1
    document["models"] = [
        {
            "name": "sim", "engine": "sim", "profile": "l4-8b",
            "sim": {"profile": "cpu-smollm2-135m", "speed": SPEED},
            "shapes": {"small": {"cpus": 2, "max_in_flight": 8}},
            "modes": {"multi-replica": {"shape": "small", "replicas": 1}},
            "control": {"policy": "static"},
        }
    ]  # fmt: skip
    site.up(document)
    return site


@pytest.mark.process
@pytest.mark.long
def test_calibration_finds_the_coefficients_and_the_simulator_agrees(sim: Site, tmp_path: Path) -> None:
    out = tmp_path / "model.json"
    # The last errors depend on the load of the machine, and are not compared.
    code, shown, err = sim.tidegate("calibrate", "sim", "--minutes", "0.1", "--out", str(out), "--json")
    assert code in (0, 7), err
    found = model_file(json.loads(out.read_bytes()), "out")
    assert msgspec.json.decode(shown, type=PerformanceModelFile) == found
    assert (found.shape, found.degree, found.prior, found.engine) == ("small", 2, "l4-8b", "sim")
    assert found.hardware == "simulated: cpu-smollm2-135m at 2 times its speed"
    assert found.limits.max_num_batched_tokens == 128
    assert found.error.step_p50 < 0.1
    for load in ((1, 50, 1), (4, 400, 4), (8, 1500, 8), (128, 128, 1)):
        assert found.engine_model.step_time(*load) == pytest.approx(TRUTH.step_time(*load), rel=0.1)
    assert sim.status()["models"][0]["override"] is None

    # The written profile is valid in the deployment, and the output summarises the change.
    document = json.loads(sim.file.read_text())
    document["models"][0]["profile"] = str(out)
    sim.file.write_text(json.dumps(document))
    code, reported, err = sim.tidegate("apply", str(sim.file))
    assert (code, err) == (0, "")
    assert "calibrated on sim" in reported

    trace, record = tmp_path / "trace.csv", tmp_path / "record.jsonl"
    rows = [f"2026-01-01 00:00:{i // 2:02d}.{5 * (i % 2)},{40 + 10 * (i % 7)},{6 + i % 5}" for i in range(16)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    url = f"http://127.0.0.1:{sim.port}"
    code, _, err = sim.tidegate("replay", str(trace), "--url", url, "--record", str(record))
    assert code == 0, err
    plot = tmp_path / "plot.svg"
    check = ("--check", str(record), "--profile", str(out), "-f", str(sim.file), "--plot", str(plot))
    code, shown, err = sim.tidegate("calibrate", "sim", *check, "--json")
    assert code == 0, err
    compared = json.loads(shown)
    assert (compared["live"], compared["simulated"]) == (16, 16)
    assert set(compared["quantiles"]) == {"ttft", "itl", "e2e"}
    assert abs(compared["quantiles"]["itl"]["p50"]["error"]) < 0.25
    assert "<svg" in plot.read_text()

    code, _, err = sim.tidegate("calibrate", "sim", "--shape", "large")
    assert code == 5
    assert "replicas of shape small serve" in err
    code, _, err = sim.tidegate("calibrate", "nobody")
    assert code == 5
    assert "nobody" in err


def run(folder: Path, *words: str) -> Result:
    Site(folder, 1, 2, "http://127.0.0.1:3").write()
    state = ("--state-dir", str(folder / "state"))
    return CliRunner().invoke(group, [*state, "calibrate", "m", *words])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--profile", "FILE"), "need --check"),
        (("--check", "FILE"), "--profile FILE"),
        (("--out", "none/there.json"), "a folder that exists"),
        (("--url", "ftp://there"), "http"),
        (("--minutes", "0"), "--minutes"),
    ],
)
def test_usage_errors(tmp_path: Path, words: tuple[str, ...], expected: str) -> None:
    (tmp_path / "file").touch()
    result = run(tmp_path, *(str(tmp_path / "file") if word == "FILE" else word for word in words))
    assert result.exit_code == 2
    assert expected in result.output


def test_an_invalid_record_is_refused_with_its_line(tmp_path: Path) -> None:
    file, record = tmp_path / "model.json", tmp_path / "record.jsonl"
    file.write_bytes(encode(made()))
    row = '{"at":0.1,"late_s":0,"input_tokens":5,"output_tokens":2,"status":%d}\n'
    check = ("--check", str(record), "--profile", str(file), "-f", str(tmp_path / "deployment.yaml"))
    for content, message in (
        (row % 200 + '{"at":1}\n', f"{record}:2"),
        (row % 503, "at least one was served"),
    ):
        record.write_text(content)
        error = run(tmp_path, *check).exception
        assert isinstance(error, Exception)
        assert (exit_of(error), message in str(error)) == (ExitCode.INVALID, True)


def test_failed_requests_and_those_of_other_models_are_named(tmp_path: Path) -> None:
    site = Site(tmp_path, 1, 2, "")
    document = site.shipped("sim.yaml")
    alone = {
        "engine": "sim",
        "profile": "cpu-smollm2-135m",
        "shapes": {"large": {"cpus": 2}},
        "modes": {"multi-replica": {"shape": "large", "replicas": 1}},
        "control": {"policy": "static"},
    }
    document["models"] = [{"name": "m", **alone}, {"name": "n", **alone}]
    site.file.write_text(json.dumps(document))
    file, record = tmp_path / "model.json", tmp_path / "record.jsonl"
    file.write_bytes(encode(made()))
    answer = {"late_s": 0.0, "input_tokens": 5, "output_tokens": 2, "ttft_s": 0.1, "e2e_s": 0.2}
    rows = [("m", 200), ("m", 503), ("n", 200), ("m", 200), ("n", 200)]
    lines = [
        {"at": 0.1 * i, "model": model, "status": status, **answer} for i, (model, status) in enumerate(rows)
    ]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("calibrate", "m", "--check", record, "--profile", file, "-f", site.file)
    shown = CliRunner().invoke(group, list(map(str, words)))
    assert shown.exit_code == 0, shown.exception
    assert "2 requests served live, 2 simulated" in shown.stdout
    assert "1 request failed live" in shown.stdout and "2 requests of other models" in shown.stdout
    compared = json.loads(CliRunner().invoke(group, [*map(str, words), "--json"]).stdout)
    assert (compared["failed"], compared["left_out"]) == (1, 2)


def test_without_a_deployment_nothing_is_calibrated(tmp_path: Path) -> None:
    error = run(tmp_path).exception
    assert isinstance(error, Unreachable)
    assert "Nothing was ever started" in str(error)
