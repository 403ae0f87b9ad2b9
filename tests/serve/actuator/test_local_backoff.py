"""The back-off of the local actuator for hosts that end at once."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from policy.config.deployment import Cluster
from policy.scaling.reconcile_steps import MAX_FAILURES, STABLE_S, LayerKey
from serve.actuator.interface import ActuatorLayer
from serve.actuator.local import LayerRecord, LocalActuator
from store.state_dir import StateDir
from tests.serve.sim_documents import deployment

KEY = LayerKey("m", "small", 1)


class Site:
    """A layer with a host, whose program ends at once until it is another ``command``.

    Time is real, and as much later as ``ahead_s``; process start times are real.
    """

    def __init__(self, folder: Path) -> None:
        self.ahead_s = 0.0
        self._state = StateDir(folder).ensure()
        self._program = folder / "host"
        self.command("false")
        self.actuator = LocalActuator(
            self._state, Cluster(controller="127.0.0.1:1"), interpreter=str(self._program), wall=self.now
        )

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
        (found,) = self._state.load(self._state.hosts_path, list[LayerRecord]) or []
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


async def test_a_host_that_a_full_disk_did_not_record_has_its_specification_and_is_recorded_later(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = tmp_path / "received"
    await site.actuator.deploy(KEY, deployment().models[0], None, "d", 0)
    site.command(f'sh -c "cat > {received}; exec sleep 60"')
    save = StateDir.save

    def full_with_a_host(state: StateDir, path: Path, value: list[LayerRecord]) -> None:
        if value[0].processes:
            raise OSError(errno.ENOSPC, "no space left on device")
        save(state, path, value)

    with monkeypatch.context() as disk:
        disk.setattr(StateDir, "save", full_with_a_host)
        with pytest.raises(OSError, match="no space left"):
            await site.actuator.scale(KEY, 1)
        # The control loop goes on.
        assert (await site.layer()).wanted == 1
    async with asyncio.timeout(60):
        while not (received.exists() and received.read_text().endswith("\n")):  # noqa: ASYNC110 - a process
            await asyncio.sleep(0.01)
    assert site.record.processes == ()
    await site.layer()
    assert len(site.record.processes) == 1


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
