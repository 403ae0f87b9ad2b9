"""The back-off of the local actuator for hosts that end at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from policy.config.deployment import Cluster
from policy.scaling.reconcile_steps import MAX_FAILURES, STABLE_S, LayerKey
from serve.actuator import local
from serve.actuator.local import LocalActuator
from store.state_dir import StateDir
from tests.serve.sim_documents import deployment

KEY = LayerKey("m", "small", 1)


class Clock:
    """Real time, and as much more as a test adds; process start times are real."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s

    def past(self, instant: float) -> None:
        self.ahead_s = max(self.ahead_s, instant - time.time())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(local, "time", SimpleNamespace(time=made))
    return made


@pytest.fixture
async def actuator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> AsyncIterator[LocalActuator]:
    run(monkeypatch, tmp_path, "false")
    made = LocalActuator(StateDir(tmp_path).ensure(), Cluster(controller="127.0.0.1:1"))
    yield made
    await made.stop()
    await made.close()


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, command: str) -> None:
    program = folder / command.replace(" ", "-")
    program.write_text(f"#!/bin/sh\nexec {command}\n")
    program.chmod(0o755)
    monkeypatch.setattr(local, "sys", SimpleNamespace(executable=str(program)))


async def failures(actuator: LocalActuator, count: int, clock: Clock) -> None:
    while actuator._records[KEY].failures < count:
        clock.past(actuator._records[KEY].retry_at)
        await actuator.layers()
        await asyncio.sleep(0.001)


async def ended(actuator: LocalActuator) -> None:
    while actuator._records[KEY].processes:
        await actuator.layers()
        await asyncio.sleep(0.001)


async def test_failing_hosts_are_reported_until_scaled_to_zero(actuator: LocalActuator, clock: Clock) -> None:
    await actuator.deploy(KEY, deployment().models[0], None, "d", 1)
    assert (await actuator.layers())[KEY].trouble == ""
    await failures(actuator, 3, clock)
    assert (await actuator.layers())[KEY].trouble == "3 hosts in a row failed"
    await actuator.scale(KEY, 0)
    assert (await actuator.layers())[KEY].trouble == ""


async def test_a_failed_start_is_retried_after_its_backoff(actuator: LocalActuator, clock: Clock) -> None:
    await actuator.deploy(KEY, deployment().models[0], None, "d", 1)
    await failures(actuator, 2, clock)
    await ended(actuator)
    await actuator.layers()
    assert actuator._records[KEY].processes == ()
    again_at = (await actuator.layers())[KEY].retry_at
    assert again_at == actuator._records[KEY].retry_at > clock()
    clock.past(actuator._records[KEY].retry_at)
    await actuator.layers()
    assert len(actuator._records[KEY].processes) == 1


async def test_other_counts_do_not_reset_the_backoff(actuator: LocalActuator, clock: Clock) -> None:
    await actuator.deploy(KEY, deployment().models[0], None, "d", 1)
    await failures(actuator, 3, clock)
    again_at = actuator._records[KEY].retry_at
    for count in (2, 3, 1):
        await actuator.scale(KEY, count)
    assert actuator._records[KEY].failures >= 3
    assert actuator._records[KEY].retry_at >= again_at > clock()
    assert (await actuator.layers())[KEY].trouble != ""


async def test_a_wall_clock_set_back_does_not_delay_starts(actuator: LocalActuator, clock: Clock) -> None:
    await actuator.deploy(KEY, deployment().models[0], None, "d", 1)
    await failures(actuator, 2, clock)
    await ended(actuator)
    clock.ahead_s -= 3600.0
    await actuator.layers()
    assert len(actuator._records[KEY].processes) == 1


async def test_a_stable_host_resets_the_failures(
    actuator: LocalActuator, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await actuator.deploy(KEY, deployment().models[0], None, "d", 1)
    await failures(actuator, MAX_FAILURES, clock)
    run(monkeypatch, tmp_path, "sleep 600")
    clock.past(actuator._records[KEY].retry_at)
    while not actuator._records[KEY].processes:
        await actuator.layers()
    assert (await actuator.layers())[KEY].trouble != ""
    clock.ahead_s += STABLE_S + 1
    # It may still be starting: its model is allowed to take a minute.
    assert (await actuator.layers())[KEY].trouble != ""
    clock.ahead_s += 60
    assert (await actuator.layers())[KEY].trouble == ""
