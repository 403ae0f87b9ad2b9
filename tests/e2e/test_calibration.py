"""Errors of the simulator on real vLLM: calibrated, it replays a trace that it was not calibrated on."""

from __future__ import annotations

import csv
import datetime
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from policy.engine.performance_model_file import PerformanceModelFile, model_file
from tests.e2e.conftest import CHAT
from tests.e2e.stack import ROOT, Stack, running

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(2400, func_only=True)]

TRACE = "AzureLLMInferenceTrace_conv_2023.csv"
# Of the hour of the trace, ten minutes from its middle. Lengths are a tenth, and one in fourteen requests is
# sent: one in two seconds, which two cores can take.
FROM_S, MINUTES = 1500.0, 10.0
SHORTER, FEWER = 10, 14
LONGEST = 600
# What other programs may use of the cores while latencies are measured: an error of as much is theirs.
OTHERS_PERCENT = 10.0
# Relative errors of the simulator, by measure and quantile.
BOUNDS = {
    ("ttft", "p50"): 0.20,
    ("ttft", "p90"): 0.30,
    ("e2e", "p50"): 0.20,
    ("e2e", "p90"): 0.30,
    ("itl", "p50"): 0.10,
    ("itl", "p90"): 0.10,
}


@contextmanager
def undisturbed(stack: Stack) -> Iterator[None]:
    """Skip, also instead of a failure, where other programs used the cores meanwhile: it takes minutes."""
    before, began = _of_others_s(stack), time.monotonic()
    try:
        yield
    finally:
        cores_s = (time.monotonic() - began) * (psutil.cpu_count() or 1)
        if (used := 100.0 * (_of_others_s(stack) - before) / cores_s) > OTHERS_PERCENT:
            pytest.skip(f"other programs used {used:.0f} % of the cores: the latencies are theirs")


def _of_others_s(stack: Stack) -> float:
    """CPU seconds of this machine since its start that are neither this test's nor the deployment's."""
    total = psutil.cpu_times()
    busy_s = total.user + total.nice + total.system + total.irq + total.softirq + total.steal
    own = psutil.Process().cpu_times()
    own_s = own.user + own.system + own.children_user + own.children_system
    for process in stack.processes():
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own_s += used.user + used.system
    return busy_s - own_s


@pytest.fixture(scope="module")
def alone(idle_cores: None) -> Iterator[Stack]:
    """The shipped CPU deployment as one large replica: no other shape and no other model uses its cores."""
    document = yaml.safe_load((ROOT / "deployments" / "smollm2-cpu-modes.yaml").read_text())
    (model,) = document["models"]
    model["modes"] = {"single-large": model["modes"]["single-large"]}
    # Load points are heavier than what keeps the objective.
    model["control"] = {"policy": "static"}
    with running(document) as stack:
        yield stack


@pytest.fixture(scope="module")
def calibrated(alone: Stack, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PerformanceModelFile]:
    alone.steady(CHAT, 1)
    out = tmp_path_factory.mktemp("calibrated") / "model.json"
    with undisturbed(alone):
        done = alone.run("calibrate", CHAT, "--minutes", "5", "--out", str(out), timeout_s=900)
    assert done.returncode in (0, 7), done.stdout + done.stderr
    return out, model_file(json.loads(out.read_bytes()), str(out))


def rows(folder: Path) -> Iterator[tuple[str, int, int]]:
    begins: datetime.datetime | None = None
    with (folder / TRACE).open(newline="") as file:
        for number, row in enumerate(csv.DictReader(file)):
            at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            begins = begins or at
            passed_s = (at - begins).total_seconds() - FROM_S
            if 0.0 <= passed_s < 60.0 * MINUTES and number % FEWER == 0:
                lengths = (int(row[key]) // SHORTER for key in ("ContextTokens", "GeneratedTokens"))
                read, written = (min(max(length, 2), LONGEST) for length in lengths)
                yield row["TIMESTAMP"], read, written


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("TIDEGATE_TRACES") or ROOT.parent / "shared" / "traces")
    if not (folder / TRACE).exists():
        pytest.skip(f"{folder / TRACE} is not here: set TIDEGATE_TRACES to the folder of the public traces")
    found = tmp_path_factory.mktemp("trace") / "slice.csv"
    with found.open("w", newline="") as file:
        written = csv.writer(file)
        written.writerow(["TIMESTAMP", "ContextTokens", "GeneratedTokens"])
        written.writerows(rows(folder))
    return found


def test_held_out_load_points_are_predicted(calibrated: tuple[Path, PerformanceModelFile]) -> None:
    _, found = calibrated
    assert found.error.itl_p50 <= 0.10
    assert found.error.ttft_p90 <= 0.20
    assert found.engine.startswith("vllm ")
    assert "2 of " in found.hardware


def test_the_simulator_agrees_with_the_live_replica(
    alone: Stack, calibrated: tuple[Path, PerformanceModelFile], trace: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    url = alone.base_url.removesuffix("/v1")
    with undisturbed(alone):
        replayed = alone.run(
            "replay", str(trace), "--url", url, "--model", CHAT, "--record", str(record), timeout_s=1500
        )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr

    arguments = ("calibrate", CHAT, "--check", str(record), "--profile", str(calibrated[0]))
    checked = alone.run(*arguments, "--json")
    assert checked.returncode == 0, checked.stderr
    found = json.loads(checked.stdout)
    assert found["live"] == found["simulated"] > 200
    exceeded = {
        f"{measure} {quantile}": found["quantiles"][measure][quantile]
        for (measure, quantile), bound in BOUNDS.items()
        if abs(found["quantiles"][measure][quantile]["error"]) > bound
    }
    assert exceeded == {}, checked.stdout
