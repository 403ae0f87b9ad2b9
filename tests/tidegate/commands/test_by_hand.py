"""``tidegate scale`` and ``mode``: what is set by hand, for how long, and how to go back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from policy.scaling.situation import Override
from serve.controller_api import ModelStatus
from tidegate.cli import group
from tidegate.commands.fleet import scale_mode


def status(**over: Any) -> ModelStatus:
    fields: dict[str, Any] = {
        "name": "sim", "engine": "sim", "mode": "multi-replica", "shape": "small", "generation": 1,
        "target": 1, "ready": 1, "phase": "steady",
    }  # fmt: skip
    return ModelStatus(**fields | over)


class Controller:
    """Takes what it is told, and is there at once; ``comes_to`` is what becomes of it."""

    def __init__(self, comes_to: ModelStatus | None = None) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._now = status()
        self._comes_to = comes_to

    def scale(self, model: str, replicas: int | None, for_s: float | None = None) -> ModelStatus:
        self.asked.append((model, replicas, for_s))
        self._now = status(target=replicas or 1, phase="starting")
        return self._now

    def mode(self, model: str, mode: str | None, for_s: float | None = None) -> ModelStatus:
        self.asked.append((model, mode, for_s))
        self._now = status(mode=mode or "multi-replica", phase="switching")
        return self._now

    def status(self) -> SimpleNamespace:
        now = self._comes_to or status(mode=self._now.mode, target=self._now.target, ready=self._now.target)
        return SimpleNamespace(models=[now])


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setattr(scale_mode.time, "time", lambda: 1000.0)

    def invoke(controller: Controller, *words: str) -> Result:
        monkeypatch.setattr(scale_mode, "controller_client", lambda state: controller)
        return CliRunner().invoke(group, ["--state-dir", str(tmp_path), *words])

    return invoke


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("scale", "sim", "3"), ("sim", 3, None)),
        (("scale", "sim", "0"), ("sim", 0, None)),
        (("scale", "sim", "3", "--for", "30m"), ("sim", 3, 1800.0)),
        (("scale", "sim", "auto"), ("sim", None, None)),
        (("mode", "sim", "single-large"), ("sim", "single-large", None)),
        (("mode", "sim", "single-large", "--for", "1h30m"), ("sim", "single-large", 5400.0)),
        (("mode", "sim", "auto"), ("sim", None, None)),
    ],
)
def test_what_the_controller_is_told(run: Run, words: tuple[str, ...], asked: tuple[Any, ...]) -> None:
    controller = Controller()
    done = run(controller, *words)
    assert done.exit_code == 0, done.output
    assert controller.asked == [asked]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("scale", "sim", "3", "--for", "30m"), "Set by hand until {}: `tidegate scale sim auto` lets load"),
        (("scale", "sim", "3"), "Set by hand: `tidegate scale sim auto` lets load decide again."),
        (("mode", "sim", "single-large"), "Set by hand: `tidegate mode sim auto` lets load decide again."),
        (("scale", "sim", "auto"), "Load decides."),
    ],
)
def test_it_says_until_when_and_how_to_go_back(run: Run, words: tuple[str, ...], said: str) -> None:
    first, second = run(Controller(), *words).output.splitlines()
    assert first.startswith("sim: ")
    assert second.startswith(said.format(scale_mode.clock(2800.0, 1000.0)))


@pytest.mark.parametrize(("command", "other"), [("scale", "mode"), ("mode", "scale")])
def test_what_is_still_set_by_hand_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str, other: str
) -> None:
    controller = Controller()
    still = status(override=Override(mode="multi-replica", count=1))
    monkeypatch.setattr(controller, command, lambda *wanted: still)
    assert f"once `tidegate {other} sim auto` takes back" in run(controller, command, "sim", "auto").output


def test_waiting_returns_what_there_is_then(run: Run) -> None:
    done = run(Controller(), "scale", "sim", "2", "--wait", "--json")
    assert json.loads(done.output)["ready"] == 2
    shown = run(Controller(), "mode", "sim", "single-large", "--wait").output
    assert "sim: single-large, 1 of 1 ready, steady" in shown


def test_what_was_rolled_back_is_not_said_to_be_set(run: Run) -> None:
    back = status(note="rolled back from single-large x 1: out of memory")
    done = run(Controller(back), "mode", "sim", "single-large", "--wait")
    assert done.exit_code == 1
    assert "did not reach single-large x 1" in done.stderr
    assert "Set by hand" not in done.output


@pytest.mark.parametrize(
    "words",
    [
        ("scale", "sim", "two"),
        ("scale", "sim", "-1"),
        ("scale", "sim", "3", "--for", "30"),
        ("scale", "sim", "3", "--for", "soon"),
        ("scale", "sim", "auto", "--for", "30m"),
        ("mode", "sim", "auto", "--for", "30m"),
        ("mode", "sim", "huge"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_meant_is_a_usage_error(run: Run, words: tuple[str, ...]) -> None:
    controller = Controller()
    assert run(controller, *words).exit_code == 2
    assert controller.asked == []
