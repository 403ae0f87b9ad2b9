"""``tidegate status``: the scaling of each model, and its replicas."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console

from policy.engine.replica_capacity import Capability
from policy.scaling.decision_types import ModeOverride
from policy.types import EMPTY_FLEET, FleetSnapshot, Replica, ReplicaLoad, ReplicaPhase
from policy.wire.usage_query import LedgerStatus
from serve.controller_api_schema import ModelStatus
from tidegate.commands.fleet.status import StatusData, render
from tidegate.commands.units import clock

NOW = 1000.0


def model(name: str = "sim", **over: Any) -> ModelStatus:
    fields: dict[str, Any] = {
        "engine": "sim", "mode": "multi-replica", "shape": "small", "generation": 1, "target": 4, "ready": 2,
        "phase": "starting", "decided_by": "predictive", "decided_at": 997.0, "forecast": 12.4,
        "capability": Capability(mu=3.4, mu_max=5.1, version=3), "reason": "up to 16.1/s are expected",
    }  # fmt: skip
    return ModelStatus(name=name, **fields | over)


def shown(
    *models: ModelStatus, fleet: FleetSnapshot = EMPTY_FLEET, ledger: LedgerStatus | None = None
) -> list[list[str]]:
    out = io.StringIO()
    view = StatusData(
        state_dir="/s", at=NOW, supervisor=None, models=models, fleet=fleet, fleet_age_s=0.0,
        controller="local, pid 7", ledger=ledger,
    )  # fmt: skip
    Console(file=out, width=120, markup=False, highlight=False).print(render(view))
    return [line.split() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("behind_s", "row"),
    [(0.4, None), (75.0, "ledger behind by 1 min 15 s: 8 requests wait, 0 are lost")],
)
def test_a_ledger_that_is_behind_is_shown(behind_s: float, row: str | None) -> None:
    ledger = LedgerStatus(waiting=8, behind_s=behind_s, segments=2, lost=0)
    rows = [" ".join(line) for line in shown(ledger=ledger) if line[:1] == ["ledger"]]
    assert rows == ([] if row is None else [row])


HEADS = ["model", "scaled", "by", "forecast", "capacity", "per", "replica", "last", "decision", "reason"]


def scaling(*models: ModelStatus) -> list[str]:
    lines = shown(*models)
    start = lines.index(HEADS) + 1
    return [" ".join(line) for line in lines[start : start + len(models)]]


@pytest.mark.parametrize(
    ("over", "row"),
    [
        ({}, "sim predictive 12.4/s 3.40/s (model v3) 3.0 s ago up to 16.1/s are expected"),
        (
            {"forecast": None, "capability": None, "decided_at": None, "reason": "idle"},
            "sim predictive - - - idle",
        ),
        ({"reason": "low", "barred": {"large": NOW + 60}}, "low; large failed; no switch to it before"),
        ({"dry_run": True}, "predictive, dry run"),
        ({"override": ModeOverride(mode="multi-replica", count=4)}, "manual override 12.4/s"),
        (
            {"override": ModeOverride(mode="multi-replica", count=4, until=2800.0)},
            f"manual override until {clock(2800.0, NOW)}",
        ),
        ({"capability": Capability(mu=0.0, mu_max=5.1)}, "max 5.10/s, SLO missed"),
    ],
)
def test_scaling(over: dict[str, Any], row: str) -> None:
    assert row in scaling(model(**over))[0]


def test_models_show_desired_and_ready_replicas() -> None:
    lines = [" ".join(line) for line in shown(model(), model("e", phase="external", target=0, decided_by=""))]
    assert "model engine mode revision desired/ready phase note" in lines
    assert "sim sim multi-replica 1 4/2 starting" in lines
    assert any("-/2 external" in line for line in lines)
    assert not any("scaled by" in " ".join(line) for line in shown(model(decided_by="")))


def test_servers_show_their_mode_and_adapters() -> None:
    names = tuple(f"a{i}" for i in range(5))
    own = Replica(
        id="r1", model="sim", shape="small", generation=1, state=ReplicaPhase.READY, load=ReplicaLoad(at=NOW),
        pid=7, adapters=names,
    )  # fmt: skip
    server = msgspec.structs.replace(own, id="h:1", mode="one", pid=0)
    lines = [
        " ".join(line)
        for line in shown(fleet=FleetSnapshot(epoch=1.0, version=1, at=NOW, replicas=(own, server)))
    ]
    assert any(line.startswith("h:1 small one 1 ready") and "a0, a1, a2 and 2 more" in line for line in lines)
    assert any(line.startswith("r1 small - 1 ready") and "a0" not in line for line in lines)


def test_replicas_show_failures_and_the_age_of_their_metrics() -> None:
    replica = Replica(
        id="r1", model="sim", shape="small", generation=1, state=ReplicaPhase.STARTING,
        load=ReplicaLoad(at=NOW - 0.7), failures=3,
    )  # fmt: skip
    lines = shown(model(), fleet=FleetSnapshot(epoch=1.0, version=1, at=NOW, replicas=(replica,)))
    assert "r1 small 1 starting, failed 3 times 0 0/0 0% 0.7 s ago" in " ".join(lines[-1])
    assert "updated" in lines[-2]
