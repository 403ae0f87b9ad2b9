"""``tidegate status``: who decides for each model, by what, and what came of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from policy.engine.capacity import Capability
from policy.scaling.situation import Override
from policy.types import EMPTY_FLEET, Fleet, Load, Replica, ReplicaPhase
from serve.controller_api import ModelStatus
from tidegate.commands.durations import clock
from tidegate.commands.fleet.status_data import StatusData
from tidegate.commands.fleet.status_tables import render

NOW = 1000.0


def model(name: str = "sim", **over: Any) -> ModelStatus:
    fields: dict[str, Any] = {
        "engine": "sim", "mode": "multi-replica", "shape": "small", "generation": 1, "target": 4, "ready": 2,
        "phase": "starting", "decided_by": "predictive", "decided_at": 997.0, "forecast": 12.4,
        "capability": Capability(mu=3.4, mu_max=5.1, version=3), "reason": "up to 16.1/s are expected",
    }  # fmt: skip
    return ModelStatus(name=name, **fields | over)


def shown(*models: ModelStatus, fleet: Fleet = EMPTY_FLEET) -> list[list[str]]:
    """The words of each line of what is printed at 120 columns."""
    out = io.StringIO()
    view = StatusData(
        state_dir="/s", at=NOW, supervisor=None, models=models, fleet=fleet, fleet_age_s=0.0,
        controller="local, pid 7",
    )  # fmt: skip
    Console(file=out, width=120, markup=False, highlight=False).print(render(view))
    return [line.split() for line in out.getvalue().splitlines()]


def decided(*models: ModelStatus) -> list[str]:
    """The rows of who decides."""
    lines = shown(*models)
    start = lines.index(["model", "decided", "by", "expects", "one", "takes", "last", "reason"]) + 1
    return [" ".join(line) for line in lines[start : start + len(models)]]


def test_a_row_says_who_decides_and_by_what() -> None:
    assert decided(model(), model("other", forecast=None, capability=None, decided_at=None)) == [
        "sim predictive 12.4/s 3.40/s, v3 3.0 s ago up to 16.1/s are expected",
        "other predictive - - - up to 16.1/s are expected",
    ]


def test_a_mode_that_failed_is_said_to_be_barred() -> None:
    (row,) = decided(model(reason="low", barred={"large": NOW + 60}))
    assert row.endswith(f"low; large failed and is not tried before {clock(NOW + 60, NOW)}")


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"dry_run": True}, "predictive, dry run"),
        ({"override": Override(mode="multi-replica", count=4)}, "by hand 12.4/s"),
        (
            {"override": Override(mode="multi-replica", count=4, until=2800.0)},
            f"by hand until {clock(2800.0, NOW)}",
        ),
        ({"capability": Capability(mu=0.0, mu_max=5.1)}, "5.10/s at most"),
    ],
)
def test_what_is_special_about_it(over: dict[str, Any], said: str) -> None:
    (row,) = decided(model(**over))
    assert said in row


def test_where_nobody_decides_there_is_no_table() -> None:
    assert not any("decided" in line for line in shown(model(decided_by="")))


def test_a_replica_that_keeps_failing_says_how_often() -> None:
    replica = Replica(
        id="r1",
        model="sim",
        shape="small",
        generation=1,
        state=ReplicaPhase.STARTING,
        load=Load(at=NOW),
        failures=3,
    )
    lines = shown(model(), fleet=Fleet(epoch=1.0, version=1, at=NOW, replicas=(replica,)))
    assert "r1 small 1 starting, failed 3 times" in " ".join(lines[-1])
