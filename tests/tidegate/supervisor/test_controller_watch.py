"""The watch of the controller: one that is stopped is restarted, one that is away or slow is not."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from policy.errors import EngineFailed, Unreachable
from serve.controller.client import ControllerClient
from store.state_dir import StateDir
from tests.ports import free_ports
from tests.serve.sim_documents import document
from tests.tidegate.conftest import until
from tidegate.supervisor.controller_watch import UNANSWERED, watch_controller


async def test_only_pings_in_a_row_without_an_answer_restart_it_and_a_failure_is_repeated() -> None:
    answers = iter([*(UNANSWERED - 1) * [True], False, *2 * UNANSWERED * [True]])
    told: list[str] = []
    restarts: list[int] = []
    pings = 0

    def hangs() -> bool:
        nonlocal pings
        pings += 1
        return next(answers)

    async def restart() -> None:
        restarts.append(pings)
        if len(restarts) == 1:
            raise EngineFailed("no cluster")
        watching.cancel()

    watching = asyncio.ensure_future(watch_controller(hangs, restart, told.append, period_s=0.0))
    await asyncio.wait([watching])
    assert restarts == [2 * UNANSWERED, 3 * UNANSWERED]
    assert told[1] == "the controller cannot be restarted: no cluster"


def answers(client: ControllerClient) -> bool:
    with suppress(Unreachable):
        return bool(client.status().pid)
    return False


@pytest.fixture
def client(tmp_path: Path) -> Iterator[tuple[ControllerClient, subprocess.Popen[bytes]]]:
    state, address = StateDir(tmp_path).ensure(), f"127.0.0.1:{free_ports(1)[0]}"
    state.save(state.deployment_path, document(cluster={"controller": address}))
    command = [sys.executable, "-m", "tests.serve.lone_controller", str(state.root)]
    with closing(ControllerClient(address, state.secret(), timeout_s=0.5)) as made:
        assert not made.hangs()
        with subprocess.Popen(command) as process:
            yield made, process
            process.kill()


@pytest.mark.process
def test_a_stopped_controller_hangs(client: tuple[ControllerClient, subprocess.Popen[bytes]]) -> None:
    made, process = client
    until(lambda: answers(made), "it answers")
    process.send_signal(signal.SIGSTOP)
    assert made.hangs()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not made.hangs()
