"""``tidegate scale`` and ``mode``: manual overrides, their duration, and their end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from policy.scaling.decision_types import ModeOverride
from serve.controller_api_schema import ModelStatus
from tests.tidegate.commands.fleet_status import model_status
from tidegate.cli import group
from tidegate.commands.fleet import manual_overrides


class Controller:
    """Applies each request at once; with ``result``, ends in that status instead."""

    def __init__(self, result: ModelStatus | None = None) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self._now = model_status()
        self._result = result

    def scale(self, model: str, replicas: int | None, for_s: float | None = None) -> ModelStatus:
        self.requests.append((model, replicas, for_s))
        self._now = model_status(target=replicas or 1, phase="starting")
        return self._now

    def mode(self, model: str, mode: str | None, for_s: float | None = None) -> ModelStatus:
        self.requests.append((model, mode, for_s))
        self._now = model_status(mode=mode or "multi-replica", phase="switching")
        return self._now

    def status(self) -> SimpleNamespace:
        now = self._result or model_status(
            mode=self._now.mode, target=self._now.target, ready=self._now.target
        )
        return SimpleNamespace(models=[now])


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setattr(manual_overrides.time, "time", lambda: 1000.0)

    def invoke(controller: Controller, *words: str) -> Result:
        monkeypatch.setattr(manual_overrides, "controller_client", lambda state: controller)
        return CliRunner().invoke(group, ["--state-dir", str(tmp_path), *words])

    return invoke


@pytest.mark.parametrize(
    ("words", "request_", "message"),
    [
        ("scale sim 3", ("sim", 3, None), "Manual override; end it with `tidegate scale sim auto`."),
        ("scale sim 0", ("sim", 0, None), "Manual override; end it with `tidegate scale sim auto`."),
        (
            "scale sim 3 --for 30m",
            ("sim", 3, 1800.0),
            "Manual override until {}; end it with `tidegate scale",
        ),
        ("scale sim auto", ("sim", None, None), "The scaling policy decides on sim."),
        ("mode sim single-large", ("sim", "single-large", None), "end it with `tidegate mode sim auto`."),
        ("mode sim single-large --for 1h30m", ("sim", "single-large", 5400.0), "Manual override until"),
        ("mode sim auto", ("sim", None, None), "The scaling policy decides on sim."),
    ],
)
def test_the_end_of_an_override_is_shown(
    run: Run, words: str, request_: tuple[Any, ...], message: str
) -> None:
    controller = Controller()
    result = run(controller, *words.split())
    assert result.exit_code == 0, result.output
    assert controller.requests == [request_]
    status_line, override_line = result.output.splitlines()
    assert status_line.startswith("sim: ")
    assert message.format(manual_overrides.clock(2800.0, 1000.0)) in override_line


@pytest.mark.parametrize(("command", "other"), [("scale", "mode"), ("mode", "scale")])
def test_remaining_overrides_are_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, other: str
) -> None:
    controller = Controller()
    remaining = model_status(override=ModeOverride(mode="multi-replica", count=1))
    monkeypatch.setattr(controller, command, lambda *wanted: remaining)
    shown = run(controller, command, "sim", "auto").output
    assert f"Another manual override remains; end it with `tidegate {other} sim auto`." in shown


def test_wait_returns_the_reached_status(run: Run) -> None:
    result = run(Controller(), "scale", "sim", "2", "--wait", "--json")
    assert json.loads(result.output)["ready"] == 2
    shown = run(Controller(), "mode", "sim", "single-large", "--wait").output
    assert "sim: single-large, 1 of 1 ready, steady" in shown


def test_a_change_that_was_rolled_back_fails(run: Run) -> None:
    back = model_status(note="rolled back from single-large x 1: out of memory")
    result = run(Controller(back), "mode", "sim", "single-large", "--wait")
    assert result.exit_code == 1
    assert "did not reach single-large x 1" in result.stderr
    assert "Manual override" not in result.output


@pytest.mark.parametrize(
    "words",
    [
        *("scale sim two", "scale sim -1", "scale sim 3 --for 30"),
        *("scale sim auto --for 30m", "mode sim auto --for 30m"),
    ],
)
def test_invalid_counts_and_durations_are_usage_errors(run: Run, words: str) -> None:
    controller = Controller()
    assert run(controller, *words.split()).exit_code == 2
    assert controller.requests == []
