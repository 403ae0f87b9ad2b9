"""Row C with a stand-by: the end or the pause of the leader fails no request and loses no target."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from serve.actuator.fenced import machine_fence
from tests.faults.elected import Elected
from tests.gateway.fake_replica import SECRET
from tests.gateway.worker import until

pytestmark = pytest.mark.process
READY, STARTING, DRAINING = "ready", "starting", "draining"
# What is known of a switch while it runs: states of the old shape's replica and of the new one's.
STATES = ((READY, ""), (READY, STARTING), (READY, READY), (DRAINING, READY), ("", READY))
HOW = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
# In both directions, each state of a switch with each end.
ROUNDS = 2 * len(STATES) * len(HOW)
# A controller that is paused in the middle of an order is killed by the next leader.
ENDS = {0, -signal.SIGKILL}


async def test_c_a_stand_by_completes_the_switch_of_a_killed_leader_and_a_paused_one_is_deposed(
    tmp_path: Path,
) -> None:
    # An earlier database of this deployment knew terms that this one does not know.
    fence = machine_fence(SECRET)
    async with fence.passed(fence.highest() + 1000):
        pass
    site = Elected(tmp_path, f"sqlite:///{tmp_path}/t.db", 2.0, gateways=1)
    async with site.running(), site.load():
        address, term = await site.leader()
        await site.mode("single-large")
        site.signal(address, signal.SIGKILL)
        await site.settle("large", 1)
        before = await site.replicas()
        # The paused one finds itself deposed, and ends before it orders anything.
        address, term = await site.leader(after=term)
        paused = await site.pause(address)
        await site.leader(after=term)
        _resume(paused)
        assert await paused.wait() in ENDS
        assert await site.replicas() == before


@pytest.mark.long
@pytest.mark.timeout(1800)
async def test_c_leaders_are_killed_and_paused_in_each_state_of_a_switch(
    tmp_path: Path, postgresql_url: str
) -> None:
    site = Elected(tmp_path, postgresql_url, 4.0)
    seen = set[tuple[str, str]]()
    async with site.running(), site.load():
        await site.settle("small", 1)
        # A short state may be over before it is seen: then there are more rounds.
        for number in range(3 * ROUNDS):
            missed = [state for state in STATES if state not in seen]
            if number >= ROUNDS and not missed:
                break
            wanted = STATES[number % len(STATES)] if number < ROUNDS else missed[0]
            old, new = (("small", "large"), ("large", "small"))[number % 2]
            await site.mode({"large": "single-large", "small": "multi-replica"}[new])
            seen.add(await _reached(site, old, new, wanted))
            address, term = await site.leader()
            if HOW[number % len(HOW)] is signal.SIGKILL:
                site.signal(address, signal.SIGKILL)
            else:
                paused = await site.pause(address)
                await site.leader(after=term)
                _resume(paused)
                assert await paused.wait() in ENDS
            await site.settle(new, 1)
    assert seen == set(STATES)
    assert site.answers["ok"] > 1000


def _resume(paused: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):  # the next leader has killed it
        paused.send_signal(signal.SIGCONT)


async def _reached(site: Elected, old: str, new: str, state: tuple[str, str]) -> tuple[str, str]:
    """Wait until the switch is in ``state``, or in a later one if it was too quick; returns which."""
    found: list[tuple[str, str]] = []

    async def reached() -> bool:
        states = dict(await site.kinds())
        found[:] = [(states.get(old, ""), states.get(new, ""))]
        return found[0] in STATES and STATES.index(found[0]) >= STATES.index(state)

    await until(reached, f"{old} and {new} are {state}")
    return found[0]
