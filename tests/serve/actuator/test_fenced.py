"""Orders of a controller that was deposed are refused, also where it was paused in the middle of one."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from policy.errors import NotLeader
from policy.scaling.reconcile_steps import LayerKey
from serve.actuator import fenced
from serve.actuator.fenced import FencedActuator, MachineFence
from tests.gateway.worker import ROOT
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster

KEY = LayerKey("m", "small", 1)
# Holds the lock, and says so.
HOLDER = """
import asyncio, sys
from pathlib import Path
from serve.actuator.fenced import MachineFence
async def hold():
    async with MachineFence(Path(sys.argv[1])).passed(1):
        print("held", flush=True)
        await asyncio.sleep(3600)
asyncio.run(hold())
"""


async def test_orders_pass_in_the_order_of_their_terms(tmp_path: Path) -> None:
    leads = {1: True, 2: True}
    cluster = MemoryCluster(lambda replica: None)
    fence = MachineFence(tmp_path / "t")
    one, two = (
        FencedActuator(MemoryActuator(cluster), term, lambda term=term: leads[term], fence) for term in (1, 2)
    )
    assert await one.layers() == {}
    assert await two.layers() == {}
    # It still takes itself for the leader: it was paused after it looked.
    for order in (one.scale(KEY, 0), one.delete(KEY), one.kill(KEY, "r"), one.stop(), one.layers()):
        with pytest.raises(NotLeader, match="term 1 comes after one of term 2"):
            await order
    leads[2] = False
    with pytest.raises(NotLeader, match="of term 2, does not lead any more"):
        await two.scale(KEY, 3)
    assert fence.highest() == 2


@pytest.mark.process
async def test_who_is_paused_within_an_order_is_killed_by_who_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fenced, "PAUSED_S", 0.1)
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, str(tmp_path / "t"), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    holder.send_signal(signal.SIGSTOP)
    # It holds the lock of a file on another file system, which has the same inode number there.
    bystander = await asyncio.create_subprocess_exec("sleep", "600")
    inode = (tmp_path / "t").stat().st_ino
    locks = tmp_path / "locks"
    other = f"0: FLOCK  ADVISORY  WRITE {bystander.pid} 00:99:{inode} 0 EOF\n"
    locks.write_text(other + fenced._LOCKS.read_text())
    monkeypatch.setattr(fenced, "_LOCKS", locks)
    async with MachineFence(tmp_path / "t").passed(2):
        assert await holder.wait() == -signal.SIGKILL
    bystander.terminate()
    assert await bystander.wait() == -signal.SIGTERM
