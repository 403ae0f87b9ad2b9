"""``tidegate top``: the screen for terminals of several sizes, and what is read from a deployment."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from policy.errors import TargetError, Unreachable
from policy.types import EMPTY_FLEET, Replica, ReplicaLoad, ReplicaPhase
from policy.wire.controller_reports import GpuReport
from serve.autoscaler.decision_history import ModelHistory
from serve.controller_api_schema import LoggedDecision, ModelStatus
from store.state_dir import StateDir
from tests.tidegate.commands.fleet_status import model_status
from tests.tidegate.conftest import Site, until
from tests.tidegate.decisions import DEMAND, SIGNALS, decision, situation, unchanged
from tidegate.cli import group
from tidegate.commands.fleet import top as command
from tidegate.commands.fleet.status import StatusData
from tidegate.commands.fleet.top import FleetWatcher
from tidegate.commands.fleet.top_view import TopData, render_top
from tidegate.supervisor.control_socket import SupervisorStatus

NOW = 1010.0
SUPERVISOR = SupervisorStatus(
    pid=1, since=900.0, phase="ready", actuator="local", endpoint="http://127.0.0.1:8080", admin="",
    document={}, processes=(),
)  # fmt: skip


def model(**over: Any) -> ModelStatus:
    return model_status(**{"target": 4, "ready": 2, "phase": "starting"} | over)


def replica(name: str, **over: Any) -> Replica:
    load = ReplicaLoad(at=NOW, in_flight=12, bound=64, waiting=1, kv_used=0.62)
    return Replica(
        id=name, model="sim", shape="small", generation=1, state=ReplicaPhase.READY, load=load, **over
    )


def data(*replicas: Replica, models: tuple[ModelStatus, ...] = (model(),), **over: Any) -> TopData:
    status = StatusData(
        state_dir="/s", at=NOW, supervisor=SUPERVISOR, models=models, controller="local, pid 7",
        fleet=msgspec.structs.replace(EMPTY_FLEET, replicas=replicas),
    )  # fmt: skip
    return TopData(status=status, **over)


def logged(**over: Any) -> LoggedDecision:
    return LoggedDecision(situation=situation(**over), decision=decision())


def screen(shown: TopData, width: int = 140, height: int | None = None) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=height, markup=False, highlight=False).print(
        render_top(shown, width, height)
    )
    return out.getvalue().splitlines()


def words(lines: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


def test_models_show_load_and_latencies_beside_their_slo() -> None:
    lines = words(screen(data(latest={"sim": logged()})))
    assert lines[0].endswith("ready up 1 min 50 s http://127.0.0.1:8080/v1 controller: local, pid 7")
    assert "model mode ready phase load in flight queue TTFT/SLO ITL/SLO goodput" in lines
    assert "sim multi-replica 2/4 starting 11.8/s 31 3 1.32 s/1.00 s 41 ms/50 ms 90.0%" in lines


def test_what_is_not_known_is_left_open() -> None:
    without = logged(signals=msgspec.structs.replace(SIGNALS, demand=None))
    no_slo = logged(
        signals=msgspec.structs.replace(SIGNALS, demand=msgspec.structs.replace(DEMAND, ttft=None)),
        slo=msgspec.structs.replace(situation().slo, itl_p95_s=None),
    )
    assert "sim multi-replica 2/4 starting - - - - - -" in words(screen(data()))
    assert "sim multi-replica 2/4 starting - - - - - -" in words(screen(data(latest={"sim": without})))
    assert "sim multi-replica 2/4 starting 11.8/s 31 3 - 41 ms/- -" in words(
        screen(data(latest={"sim": no_slo}))
    )
    external = model(name="e", phase="external", mode="", target=0, ready=1)
    assert any(line.startswith("e - 1/- external") for line in words(screen(data(models=(external,)))))


def test_replicas_show_their_load_adapters_and_gpus() -> None:
    power = GpuReport(watts=612.4, celsius=71.0, clock_mhz=1755)
    shown = data(replica("b"), replica("a", adapters=("x", "y"), cards=(0, 1)), gpus={"a": power})
    lines = words(screen(shown))
    first = lines.index("replica shape state in flight waiting KV adapters GPUs power clock heat")
    assert lines[first + 1 : first + 3] == [
        "a small ready 12/64 1 62% 2 0,1 612 W 1755 MHz 71 C",
        "b small ready 12/64 1 62% 0 - - - -",
    ]


def test_changes_are_listed_with_their_reason() -> None:
    assert "no change of counts yet" in words(screen(data()))
    lines = words(screen(data(changes=(logged(),))))
    assert lines[-1].startswith("10 s ago sim multi-replica x 2 multi-replica x 4 load rises: 16.1/s at most")


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 200])
@pytest.mark.parametrize("height", [12, 24, 50])
def test_the_screen_fits_the_terminal(width: int, height: int) -> None:
    replicas = [replica(f"sim-multi-replica-g1-{i:08x}") for i in range(40)]
    changes = tuple(logged() for _ in range(30))
    shown = screen(data(*replicas, latest={"sim": logged()}, changes=changes), width, height)
    assert max(map(len, shown)) <= width
    assert len(shown) <= max(height, 16)
    seen = r"sim multi\S* 2/4 (starting )?11.8/s (31 )?(3 1.32 s/1.00 s )?(41 ms/50 ms )?90.0%"
    assert any(re.fullmatch(seen, line) for line in words(shown))
    assert any(line.startswith("and ") and line.endswith(" more") for line in words(shown))


class Controller:
    """A controller whose decisions are the given ones, newest first; external models have none."""

    def __init__(self) -> None:
        self.made = [
            LoggedDecision(situation=situation(), decision=unchanged(1005.0)),
            LoggedDecision(situation=situation(), decision=decision()),
        ]
        self.lost = False

    def decisions(self, name: str | None = None, last: int = 1) -> tuple[LoggedDecision, ...]:
        if self.lost:
            raise Unreachable("the controller does not answer")
        if name == "e":
            raise TargetError("no model is called e")
        return tuple(self.made[:last])

    def history(self, since: float, step_s: float) -> tuple[ModelHistory, ...]:
        """3 requests a second came before the screen was opened, and now 6; the rest is not known."""
        assert step_s == 30.0
        columns = {"arrivals_per_s": [3.0, None, 6.0]}
        return (ModelHistory(
            model="sim", step_s=30.0, at=[900.0, 930.0, 990.0], mode=["s"] * 3, columns=columns, changes=[]
        ),)  # fmt: skip

    def gpus(self) -> dict[str, GpuReport]:
        return {"r": GpuReport(watts=1.0)}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[FleetWatcher, Controller]:
    controller = Controller()
    both = (model(), model(name="e", phase="external"))
    monkeypatch.setattr(command, "gather", lambda state, at: data(models=both).status)
    monkeypatch.setattr(command, "controller_client", lambda state: controller)
    return FleetWatcher(StateDir(tmp_path)), controller


def test_changes_are_kept_while_decisions_go_on(watched: tuple[FleetWatcher, Controller]) -> None:
    watcher, controller = watched
    seen = watcher.read(NOW)
    assert [each.decision.at for each in seen.changes] == [1000.0]
    assert seen.latest["sim"].decision.at == 1005.0
    assert "e" not in seen.latest
    assert seen.gpus == {"r": GpuReport(watts=1.0)}
    later = LoggedDecision(situation=situation(), decision=decision(at=1010.0, count=5))
    controller.made.insert(0, later)
    controller.made.insert(0, LoggedDecision(situation=situation(), decision=unchanged(1015.0)))
    # Between two looks two decisions were made: the change is not missed for good.
    assert [each.decision.at for each in watcher.read(NOW + 10).changes] == [1010.0, 1000.0]


def test_the_curve_begins_before_the_screen_was_opened(watched: tuple[FleetWatcher, Controller]) -> None:
    seen = watched[0].read(NOW)
    assert seen.arrivals == {"sim": [None] * 16 + [3.0, None, None, 6.0]}
    assert screen(seen, 140)[4].endswith("▅  █")
    assert "█" not in "".join(screen(seen, 120))


def test_without_a_controller_the_status_is_shown(watched: tuple[FleetWatcher, Controller]) -> None:
    watcher, controller = watched
    controller.lost = True
    seen = watcher.read(NOW)
    assert (seen.latest, seen.gpus, len(seen.status.models)) == ({}, {}, 2)


def test_nothing_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(group, ["--state-dir", str(tmp_path), "top", "--once"])
    assert (result.exit_code, result.stderr) == (4, f"Nothing is running on {tmp_path}.\n")


@pytest.mark.parametrize(("typed", "ends"), [("q", True), ("x", False)])
def test_a_key_ends_it(typed: str, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = SimpleNamespace(isatty=lambda: True, read=lambda count: typed)
    monkeypatch.setattr(command.sys, "stdin", keys)
    monkeypatch.setattr(command.select, "select", lambda *given: ([keys], [], []))
    assert command.pressed("q", 1.0) is ends


@pytest.mark.process
def test_a_running_deployment_is_shown_once(site: Site) -> None:
    site.up(site.shipped("sim.yaml"))
    assert site.complete("sim").status_code == 200
    shown = until(lambda: [line for line in words(site.tidegate("top", "--once")[1].splitlines())
                           if line.startswith("sim ") and "steady" in line], "a steady model")  # fmt: skip
    assert shown
    code, out, _ = site.tidegate("top", "--once")
    assert code == 0
    assert any(" ready " in line and "%" in line for line in words(out.splitlines()))
