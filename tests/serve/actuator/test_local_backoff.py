"""The back-off of the local actuator for hosts that end at once."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from policy.config.deployment import Cluster
from policy.scaling.reconcile_steps import MAX_FAILURES, STABLE_S, LayerKey
from serve.actuator.interface import ActuatorLayer
from serve.actuator.local import LayerRecord, LocalActuator
from store.state_dir import StateDir
from tests.serve.sim_documents import deployment

KEY = LayerKey("m", "small", 1)


class Disk(StateDir):
    """A state directory that has no room for a host while it is ``full``."""

    full = False

    def save(self, path: Path, value: Any) -> None:
        if self.full and any(record.processes for record in value):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().save(path, value)


class Site:
    """A layer with a host, whose program ends at once until it is another ``command``.

    Time is real, and as much later as ``ahead_s``; process start times are real.
    """

    def __init__(self, folder: Path) -> None:
        self.ahead_s = 0.0
        self.disk = Disk(folder)
        self._program = folder / "host"
        self.command("false")
        self.restart()

    def restart(self) -> None:
        """As a controller that starts does."""
        self.actuator = LocalActuator(
            self.disk.ensure(), Cluster(controller="127.0.0.1:1"),
            interpreter=str(self._program), wall=self.now,
        )  # fmt: skip

    def now(self) -> float:
        return time.time() + self.ahead_s

    def past(self, instant: float) -> None:
        self.ahead_s = max(self.ahead_s, instant - time.time())

    def command(self, command: str) -> None:
        self._program.write_text(f"#!/bin/sh\nexec {command}\n")
        self._program.chmod(0o755)

    @property
    def record(self) -> LayerRecord:
        """What a controller that starts now would find."""
        (found,) = self.disk.load(self.disk.hosts_path, list[LayerRecord]) or []
        return found

    async def layer(self) -> ActuatorLayer:
        return (await self.actuator.layers())[KEY]

    async def fail(self, count: int) -> None:
        """Until so many hosts in a row failed."""
        await self.actuator.deploy(KEY, deployment().models[0], None, "d", 1)
        while self.record.failures < count:
            self.past(self.record.retry_at)
            await self.layer()
            await asyncio.sleep(0.001)

    async def end(self) -> None:
        """Until no host runs."""
        while self.record.processes:
            await self.layer()
            await asyncio.sleep(0.001)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    made = Site(tmp_path)
    yield made
    await made.actuator.stop()
    await made.actuator.close()


async def test_failing_hosts_are_reported_until_scaled_to_zero(site: Site) -> None:
    await site.fail(0)
    assert (await site.layer()).trouble == ""
    await site.fail(3)
    assert (await site.layer()).trouble == "3 hosts in a row failed"
    await site.actuator.scale(KEY, 0)
    assert (await site.layer()).trouble == ""


async def test_a_failed_start_is_retried_after_its_backoff(site: Site) -> None:
    await site.fail(2)
    await site.end()
    again_at = (await site.layer()).retry_at
    assert again_at is not None and again_at > site.now()
    assert site.record.processes == ()
    site.past(again_at)
    await site.layer()
    assert len(site.record.processes) == 1


async def test_other_counts_do_not_reset_the_backoff(site: Site) -> None:
    await site.fail(3)
    again_at = site.record.retry_at
    for count in (2, 3, 1):
        await site.actuator.scale(KEY, count)
    held = await site.layer()
    assert held.retry_at is not None and held.retry_at >= again_at > site.now()
    assert held.trouble != ""


async def test_a_wall_clock_set_back_does_not_delay_starts(site: Site) -> None:
    await site.fail(2)
    await site.end()
    site.ahead_s -= 3600.0
    await site.layer()
    assert len(site.record.processes) == 1


async def test_a_stable_host_resets_the_failures(site: Site) -> None:
    await site.fail(MAX_FAILURES)
    site.command("sleep 600")
    site.past(site.record.retry_at)
    while not site.record.processes:
        await site.layer()
    assert (await site.layer()).trouble != ""
    site.ahead_s += STABLE_S + 1
    # It may still be starting: its model is allowed to take a minute.
    assert (await site.layer()).trouble != ""
    site.ahead_s += 60
    assert (await site.layer()).trouble == ""


async def kill_all(site: Site) -> None:
    """Kill the hosts at once, and wait until they have ended."""
    running = site.record.processes
    for process in running:
        os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while any(process.process() for process in running):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)


async def start(site: Site, count: int) -> None:
    site.command("sleep 600")
    await site.actuator.deploy(KEY, deployment().models[0], None, "d", count)
    assert len(site.record.processes) == count


async def test_hosts_that_end_together_are_one_failure(site: Site) -> None:
    await start(site, 4)
    await kill_all(site)
    assert (await site.layer()).trouble == ""
    assert site.record.failures == 1


async def test_hosts_that_ended_before_a_controller_began_are_no_failures(site: Site) -> None:
    await start(site, 4)
    await kill_all(site)
    await site.actuator.close()
    site.restart()
    held = await site.layer()
    assert (held.trouble, held.retry_at, site.record.failures) == ("", None, 0)
    assert len(site.record.processes) == 4


@pytest.mark.parametrize("shifted_s", [0.5, 3600.0])
async def test_hosts_are_found_again_by_a_controller_after_the_clock_was_set(
    site: Site, shifted_s: float
) -> None:
    await start(site, 2)
    before = site.record
    # What a record of that time says after the clock was set. An earlier version kept no key.
    earlier = shifted_s < 1
    moved = [
        replace(p, created=p.created - shifted_s, start_key="" if earlier else p.start_key)
        for p in before.processes
    ]
    site.disk.save(site.disk.hosts_path, [replace(before, processes=tuple(moved))])
    await site.actuator.close()
    site.restart()
    assert (await site.layer()).trouble == ""
    assert [(p.pid, p.start_key) for p in site.record.processes] == [
        (p.pid, p.start_key) for p in before.processes
    ]


async def test_a_host_that_leaves_does_not_end_the_backoff(site: Site) -> None:
    await start(site, 2)
    staying, leaving = site.record.processes
    os.kill(leaving.pid, signal.SIGSTOP)
    # Of two signals that wait, the process would take the one that ends it first.
    while psutil.Process(leaving.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.001)
    await site.actuator.scale(KEY, 1)
    site.command("false")
    os.kill(staying.pid, signal.SIGKILL)
    while not site.record.failures:
        await site.layer()
        await asyncio.sleep(0.001)
    again_at = site.record.retry_at
    os.kill(leaving.pid, signal.SIGCONT)
    while leaving.pid in {process.pid for process in site.record.processes}:
        await site.layer()
        await asyncio.sleep(0.001)
    assert site.record.retry_at >= again_at


async def test_a_host_that_cannot_be_recorded_is_ended_and_started_again(site: Site) -> None:
    """Without its specification it would wait for ever, and no later controller would find it."""
    site.disk.full = True
    with pytest.raises(OSError, match="No space left"):
        await start(site, 1)
    assert site.record.processes == ()
    site.disk.full = False
    while not site.record.failures:
        await site.layer()
        await asyncio.sleep(0.001)
    assert site.record.processes == ()
    site.past(site.record.retry_at)
    await site.layer()
    assert len(site.record.processes) == 1


async def test_what_could_not_be_saved_is_saved_later(site: Site) -> None:
    await start(site, 2)
    os.kill(site.record.processes[0].pid, signal.SIGKILL)
    while not site.record.failures:
        await site.layer()
        await asyncio.sleep(0.001)
    site.disk.full = True
    with pytest.raises(OSError, match="No space left"):
        await site.actuator.scale(KEY, 3)
    assert site.record.wanted == 2
    site.disk.full = False
    await site.layer()
    assert site.record.wanted == 3


async def test_hosts_that_another_version_recorded_are_ended(site: Site) -> None:
    """Nobody could scale or replace them, and they have GPUs."""
    await start(site, 2)
    running, path = site.record.processes, site.disk.hosts_path
    foreign = path.read_bytes().replace(b'"model":{', b'"model":{"of_a_later_version":1,')
    path.write_bytes(foreign)
    await site.actuator.close()
    site.restart()
    assert await site.actuator.layers() == {}
    assert not [process for process in running if process.process()]
    assert path.with_suffix(".unreadable").read_bytes() == foreign
    await start(site, 1)
    await site.actuator.close()
    site.restart()
    assert (await site.layer()).wanted == 1


async def test_a_host_that_hangs_since_before_a_controller_began_can_be_killed(site: Site) -> None:
    await start(site, 1)
    (hung,) = site.record.processes
    os.kill(hung.pid, signal.SIGSTOP)
    await site.actuator.close()
    site.restart()
    assert (await site.layer()).hosts == (hung.replica,)
    await site.actuator.kill(KEY, hung.replica)
    while site.record.processes in ((), (hung,)):
        site.past(site.record.retry_at)
        await site.layer()
        await asyncio.sleep(0.001)
    assert (await site.layer()).hosts == (site.record.processes[0].replica,)
