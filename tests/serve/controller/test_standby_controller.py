"""The last controller that ends takes the replicas along, also where all of them end at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from policy.errors import NotLeader
from policy.leader_election import LeaderLease
from serve.controller.leadership_lease import Leadership
from serve.controller.standby_controller import ElectedController
from store.database import Database
from store.election.database_state_dir import DatabaseStateDir, highest_term
from tests.gateway.worker import until
from tests.ports import free_ports
from tests.serve.controller.test_leadership_lease import Store
from tests.serve.memory_actuator import MemoryActuator, MemoryCluster
from tests.serve.sim_documents import document

# A process that stands still for longer than a part of it loses its lease.
LEASE_S = 5.0


class Ending(MemoryActuator):
    """An actuator that notes in which term the replicas were ended."""

    def __init__(self, site: Site, term: int) -> None:
        super().__init__(MemoryCluster(lambda replica: None))
        self._site, self._term = site, term

    async def stop(self) -> None:
        self._site.ended_in.append(self._term)


@dataclass
class Site:
    """Two controllers in this process, the first of which leads."""

    root: Path
    database: Database
    store: Store = field(default_factory=Store)
    ended_in: list[int] = field(default_factory=list)
    stopping: list[asyncio.Event] = field(default_factory=list)
    running: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> None:
        addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
        for address in addresses:
            root = self.root / address
            DatabaseStateDir(root, self.database, 0).ensure()
            leadership = Leadership(self.store, address, LEASE_S, wall=time.time, monotonic=time.monotonic)
            (root / "deployment.json").write_text(json.dumps(document()))
            elected = ElectedController(
                leadership,
                state_of=lambda term, root=root: DatabaseStateDir(root, self.database, term),
                actuator_of=lambda state: Ending(self, state.term),
                fence=None, secret="s", address=address, listen=address, addresses=",".join(addresses),
            )  # fmt: skip
            self.stopping.append(asyncio.Event())
            self.running.append(asyncio.create_task(elected.run(self.stopping[-1])))
            await until(lambda leadership=leadership: bool(leadership.status().leader), "somebody leads")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    database = Database(f"sqlite:///{tmp_path}/t.db")
    made = Site(tmp_path, database)
    await made.start()
    yield made
    for task in made.running:
        task.cancel()
    await asyncio.gather(*made.running, return_exceptions=True)
    database.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the leader first", "the stand-by first"])
async def test_of_two_that_end_one_after_the_other_the_last_ends_the_replicas(
    site: Site, order: tuple[int, int]
) -> None:
    for number, expected in zip(order, (0, 1), strict=True):
        site.stopping[number].set()
        await site.running[number]
        assert len(site.ended_in) == expected


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
async def test_two_that_end_at_once_leave_no_replica(site: Site, first: int) -> None:
    for number in (first, 1 - first):
        site.stopping[number].set()
    await asyncio.gather(*site.running)
    assert site.ended_in


async def test_a_controller_that_was_deposed_before_it_began_claims_no_term(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/t.db")
    store = Store()
    store.lease = LeaderLease(holder="b", address="b:1", term=5, lease_s=600.0)
    (port,) = free_ports(1)
    address = f"127.0.0.1:{port}"
    leadership = Leadership(store, address, LEASE_S, wall=time.time, monotonic=time.monotonic)
    state = DatabaseStateDir(tmp_path, database, 5).ensure()
    (tmp_path / "deployment.json").write_text(json.dumps(document()))
    elected = ElectedController(
        leadership,
        state_of=lambda term: state,
        actuator_of=lambda state: MemoryActuator(MemoryCluster(lambda replica: None)),
        fence=None, secret="s", address=address, listen=address, addresses=address,
    )  # fmt: skip
    running = asyncio.create_task(elected.run(asyncio.Event()))
    await until(lambda: leadership.term == 5, "its successor leads")
    # It won, and was paused before it looked at its term.
    leadership.won.set()
    with pytest.raises(NotLeader):
        await running
    assert highest_term(database) == 0
    database.close()


@pytest.mark.slow
async def test_a_stand_by_that_ends_after_a_leader_that_was_killed_ends_the_replicas(site: Site) -> None:
    site.store.away = True  # so that it does not give its lease up
    site.running[0].cancel()
    await asyncio.wait([site.running[0]])
    assert site.store.lease is not None
    # It lasts as long as that of one that was killed a while ago.
    site.store.lease, site.store.away = replace(site.store.lease, lease_s=0.1), False
    site.stopping[1].set()
    await site.running[1]
    assert site.ended_in == [2]
