"""Two documents applied at once: the file and the controller end with the same one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from policy.deployment_file.parse import parse
from store.state_dir import StateDir
from tidegate.deployment_file import Document
from tidegate.supervisor.progress_events import Progress
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


async def test_concurrent_applies_are_serialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDir(tmp_path)
    first, second = document(1), document(2)
    supervisor = Supervisor(
        state,
        Document(first, parse(document(3))),
        ray=False,
        timeout_s=None,
        progress=Progress(lambda event: None),
    )
    controller = Controller()
    monkeypatch.setattr(supervisor, "_controller", lambda timeout_s: controller)
    monkeypatch.setattr(supervisor, "_phase", "ready")
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
