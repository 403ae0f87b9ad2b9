"""``tidegate apply --wait``: what is shown, when it returns, and with which exit code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from policy.errors import Unreachable
from serve.controller_api_schema import ControllerStatus, ModelStatus
from tidegate.commands.deployment.rollout_progress import follow
from tidegate.exit_codes import ExitCode


def status(phase: str, generation: int = 2, note: str = "", **over: Any) -> ModelStatus:
    fields: dict[str, Any] = {"name": "sim", "engine": "sim", "mode": "multi-replica", "shape": "small"}
    counts = {"generation": generation, "target": 1, "ready": int(phase == "steady")}
    return ModelStatus(**fields | counts | {"phase": phase, "note": note} | over)


class Controller:
    """Has one status after the other, none while it is restarted; each poll takes a second."""

    def __init__(self, *statuses: ModelStatus | None) -> None:
        self._left: Iterator[ModelStatus | None] = iter(statuses)
        self._last = statuses[-1]
        self.at = 0.0

    def status(self) -> ControllerStatus:
        model = next(self._left, self._last)
        if model is None:
            raise Unreachable("no controller")
        return ControllerStatus(actuator="local", epoch=0.0, pid=1, models=(model,))

    def sleep(self, _: float) -> None:
        self.at += 1.0


BACK = "rolled back from multi-replica x 1, generation 2: 3 starts in a row failed"


@pytest.mark.parametrize(
    ("statuses", "outcome", "polls"),
    [
        ([status("steady")], ExitCode.OK, 0),
        ([status("switching"), status("switching"), status("draining the old")], ExitCode.OK, 2),
        # Changed weights make a new revision only once they were read.
        ([status("steady", 1, resolving=True), status("switching"), status("steady")], ExitCode.OK, 2),
        (
            [status("switching"), status("rolling back", 1, BACK), status("steady", 1, BACK)],
            ExitCode.ROLLED_BACK,
            2,
        ),
        ([status("switching"), status("steady", 1)], ExitCode.ROLLED_BACK, 1),
        # From what was applied before.
        ([status("rolling back", 1, BACK), status("steady", 1, BACK)], ExitCode.OK, 1),
        ([status("starting", note="no such file")], ExitCode.FAILED, 10),
        ([None, status("switching"), None, status("steady")], ExitCode.OK, 3),
        ([status("switching"), status("rolling back", 1, BACK)], ExitCode.ROLLED_BACK, 10),
    ],
    ids=[
        "unchanged",
        "ready",
        "weights",
        "rolled back",
        "an older revision",
        "earlier",
        "time-out",
        "restarted",
        "still rolling back",
    ],
)
def test_the_wait_ends_ready_rolled_back_or_with_the_time_out(
    statuses: list[ModelStatus | None], outcome: ExitCode, polls: int
) -> None:
    controller = Controller(*statuses)
    shown: list[str] = []
    found = follow(
        controller, ["sim"], 10.0, shown.append, clock=lambda: controller.at, sleep=controller.sleep
    )
    assert (found.outcome, found.models, controller.at) == (outcome, (statuses[-1],), polls)
    assert len(shown) == len(set(shown)) <= len(statuses)


def test_each_change_is_one_line() -> None:
    controller = Controller(status("switching"), status("steady"))
    shown: list[str] = []
    follow(controller, ["sim"], 10.0, shown.append, clock=lambda: controller.at, sleep=controller.sleep)
    assert shown == [
        "sim: multi-replica, revision 2, 0 of 1 ready, switching",
        "sim: multi-replica, revision 2, 1 of 1 ready, steady",
    ]
