"""Row C with a stand-by: the end or the pause of the leader fails no request and loses no target."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from random import Random

import pytest

from tests.faults.elected import Elected

pytestmark = pytest.mark.process
KILLS = 30
# How long a switch takes, start of the engine included.
SWITCH_S = 4.0


async def test_c_a_stand_by_completes_the_switch_of_a_killed_leader_and_a_paused_one_is_deposed(
    tmp_path: Path,
) -> None:
    site = Elected(tmp_path, f"sqlite:///{tmp_path}/t.db", 2.0, gateways=1)
    async with site.running(), site.load():
        address, term = await site.leader()
        await site.mode("single-large")
        site.signal(address, signal.SIGKILL)
        await site.settle("large", 1)
        before = await site.replicas()
        # The paused one finds itself deposed, and ends before it orders anything.
        address, term = await site.leader(after=term)
        paused = site.signal(address, signal.SIGSTOP)
        await site.leader(after=term)
        paused.send_signal(signal.SIGCONT)
        assert await paused.wait() == 0
        assert await site.replicas() == before


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_c_leaders_are_killed_and_paused_in_each_state_of_a_switch(
    tmp_path: Path, postgresql_url: str
) -> None:
    random = Random(19)  # noqa: S311 - no secret
    states = set[frozenset[tuple[str, str]]]()
    site = Elected(tmp_path, postgresql_url, 4.0)
    async with site.running(), site.load():
        for number in range(KILLS):
            shape, mode = (("large", "single-large"), ("small", "multi-replica"))[number % 2]
            await site.mode(mode)
            await asyncio.sleep(random.uniform(0, SWITCH_S))
            address, term = await site.leader()
            states.add(frozenset((kind, state) for kind, state, _ in (await site.replicas()).values()))
            if number % 3:
                site.signal(address, signal.SIGKILL)
            else:
                paused = site.signal(address, signal.SIGSTOP)
                await site.leader(after=term)
                paused.send_signal(signal.SIGCONT)
                assert await paused.wait() == 0
            await site.settle(shape, 1)
    # The old shape alone, both, and the new one alone: that a switch has states at all was seen.
    assert len(states) >= 4, states
    assert site.answers["ok"] > KILLS
