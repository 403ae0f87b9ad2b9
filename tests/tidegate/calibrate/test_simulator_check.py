"""A recorded replay compared with the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.config.deployment import Deployment
from policy.errors import ConfigError
from policy.scaling.policies.static import Static
from sim.arrivals import Arrival
from sim.simulator.run import simulate
from sim.simulator.run_record import RequestColumns
from tests.policy.engine.test_performance_model_file import content
from tests.serve.sim_documents import deployment, sim_model
from tidegate.calibrate.simulator_check import RecordedRun, calibrated_model, check, recorded_run
from tidegate.replay.results import ReplayRow

TRACE = [Arrival(at=0.11 * i, input_tokens=30 + 17 * (i % 9), output_tokens=3 + i % 7) for i in range(80)]
POLICIES = {"m": Static()}


def one_replica() -> Deployment:
    modes = {"multi-replica": {"shape": "small", "replicas": 1}}
    return deployment(sim_model(modes=modes, shapes={"small": {"gpus": 1}}))


def rows(requests: RequestColumns) -> list[ReplayRow]:
    """The record of a client whose fleet behaves as the simulator."""
    return [
        ReplayRow(
            at=50.0 + float(requests.at[i]),
            late_s=0.0,
            input_tokens=int(requests.input_tokens[i]),
            output_tokens=int(requests.output_tokens[i]),
            status=200,
            ttft_s=float(requests.ttft_s[i]),
            itl_s=float(requests.itl_s[i]),
            e2e_s=float(requests.e2e_s[i]),
        )
        for i in range(len(requests))
    ]


def test_a_replay_of_the_simulator_itself_has_no_error() -> None:
    live = rows(simulate(one_replica(), POLICIES, TRACE).requests["m"])
    found = check(one_replica(), POLICIES, RecordedRun(live), 0.0, lambda at: None).compared
    assert (found.live, found.simulated) == (80, 80)
    for measure in ("ttft", "itl", "e2e"):
        for pair in found.quantiles[measure].values():
            assert pair.error == pytest.approx(0.0, abs=1e-6)


def test_network_time_is_added_to_ttft_and_e2e() -> None:
    live = rows(simulate(one_replica(), POLICIES, TRACE).requests["m"])
    found = check(one_replica(), POLICIES, RecordedRun(live), 0.5, lambda at: None).compared.quantiles
    for measure, more_s in (("ttft", 0.5), ("itl", 0.0), ("e2e", 0.5)):
        pair = found[measure]["p50"]
        assert pair.simulated - pair.live == pytest.approx(more_s, abs=1e-6)


def test_failed_requests_count_as_load_only() -> None:
    live = rows(simulate(one_replica(), POLICIES, TRACE).requests["m"])
    for i in range(0, 80, 3):
        live[i] = msgspec.structs.replace(
            live[i], status=503, error="busy", ttft_s=None, itl_s=None, e2e_s=None
        )
    found = check(one_replica(), POLICIES, RecordedRun(live), 0.0, lambda at: None).compared
    assert (found.live, found.simulated, found.failed) == (53, 53, 27)
    for quantiles in found.quantiles.values():
        for pair in quantiles.values():
            assert pair.error == pytest.approx(0.0, abs=1e-6)


def test_the_simulated_deployment_has_the_model_with_its_calibrated_profile() -> None:
    both = deployment(sim_model(), sim_model("other"))
    alone = calibrated_model(both, "m", content())
    assert [spec.name for spec in alone.models] == ["m"]
    assert alone.models[0].profile == content()


def written(folder: Path, *lines: dict[str, Any] | str) -> Path:
    path = folder / "rows.jsonl"
    texts = [line if isinstance(line, str) else msgspec.json.encode(line).decode() for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


ROW = {"at": 2.0, "late_s": 0.0, "input_tokens": 5, "output_tokens": 2, "status": 200}


def test_rows_are_in_the_order_in_which_they_were_sent(tmp_path: Path) -> None:
    found = recorded_run(written(tmp_path, ROW, ROW | {"at": 1.0}))
    assert [row.at for row in found.rows] == [1.0, 2.0]


def test_rows_of_other_models_are_left_out(tmp_path: Path) -> None:
    """They were simulated on this one. Endpoints may have another name for it, which the deployment lacks."""
    names = ("m", "other", "their-m", "other")
    path = written(tmp_path, *(ROW | {"at": at, "model": name} for at, name in enumerate(names)))
    found = recorded_run(path, {"other"})
    assert ([row.model for row in found.rows], found.left_out) == (["m", "their-m"], 2)
    with pytest.raises(ConfigError, match="at least one was served"):
        recorded_run(path, set(names))
