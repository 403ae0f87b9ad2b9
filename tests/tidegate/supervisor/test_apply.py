"""A document is applied whole or not at all; of two at once the file and the controller have the same one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from policy.deployment_file.parse import parse
from policy.errors import ConfigError
from store.state_dir import StateDir
from tidegate.deployment_file import DeploymentDocument
from tidegate.supervisor.deployment_file_watch import watch_file
from tidegate.supervisor.progress_events import ProgressLog
from tidegate.supervisor.supervisor import Supervisor


def document(timeout_s: float) -> dict[str, Any]:
    model = {
        "name": "sim", "engine": "sim", "shapes": {"small": {"cpus": 1}},
        "modes": {"multi-replica": {"shape": "small"}},
    }  # fmt: skip
    return {"models": [model], "gateway": {"queue_timeout_s": timeout_s}}


class Controller:
    """Accepts documents; its first answer is delayed."""

    def __init__(self) -> None:
        self.applied: list[object] = []
        self.answer = threading.Event()
        self.asked = threading.Event()

    def apply(self, document: object) -> None:
        self.applied.append(document)
        self.asked.set()
        if len(self.applied) == 1:
            self.answer.wait(10)


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
async def supervisor(tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """One that is ready, with a document of its own and this controller."""
    running = document(3)
    made = Supervisor(
        StateDir(tmp_path),
        DeploymentDocument(running, parse(running)),
        ray=False,
        timeout_s=None,
        progress=ProgressLog(lambda event: None),
    )
    monkeypatch.setattr(made, "_controller", lambda timeout_s: controller)
    monkeypatch.setattr(made, "_phase", "ready")
    return made


async def test_a_policy_that_fails_on_a_sample_view_changes_nothing(
    tmp_path: Path, supervisor: Supervisor, controller: Controller
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def decide(self, view, memory):\n        return 1 / 0\n"
    )
    changed, notes = document(1), list[str]()
    changed["models"][0]["control"] = {"policy": {"custom": f"{tmp_path / 'mine.py'}:Mine"}}
    with pytest.raises(ConfigError, match=r"division by zero \(mine.py:3\)") as refused:
        await supervisor.apply(changed)
    assert refused.value.path == "models[sim].control.policy"
    assert controller.applied == []
    assert not StateDir(tmp_path).deployment_path.exists()
    assert supervisor.status().document == document(3)

    noted = asyncio.Event()

    def note(text: str) -> None:
        notes.append(text)
        noted.set()

    watch = asyncio.create_task(watch_file(lambda: changed, document(3), supervisor.apply, note, every_s=0))
    async with asyncio.timeout(60):
        await noted.wait()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert f"is not applied: {refused.value}" in notes[0]
    assert supervisor.status().document == document(3)


async def test_concurrent_applies_are_serialized(
    tmp_path: Path, supervisor: Supervisor, controller: Controller
) -> None:
    state = StateDir(tmp_path)
    first, second = document(1), document(2)
    one = asyncio.create_task(supervisor.apply(first))
    await asyncio.to_thread(controller.asked.wait, 10)
    other = asyncio.create_task(supervisor.apply(second))
    # Long enough for an unserialized second apply to overtake the first.
    await asyncio.wait({other}, timeout=0.1)
    controller.answer.set()
    await asyncio.gather(one, other)
    assert controller.applied == [first, second]
    assert state.load(state.deployment_path, dict[str, Any]) == second
    assert supervisor.status().document == second
