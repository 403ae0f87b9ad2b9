"""The sweep over replicas, where one that holds many requests makes no progress."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from unittest.mock import Mock

import pytest
from msgspec import structs

from gateway.routing.fleet import SNAPSHOT_STALE_S, FleetView
from gateway.routing.outlier_ejection import MOST_MOVED, ReplicaProber
from gateway.routing.replica_handle import ReplicaHandle
from gateway.telemetry.metrics import WorkerMetrics
from policy.config.deployment import Deployment
from policy.routing.replica_health import HealthCounters, ReplicaHealth
from policy.types import EngineKind, FleetSnapshot, Model, Runner
from tests.gateway.fake_replica import ready_replica
from tests.gateway.queue.test_admission import Queues, end
from tests.gateway.virtual_time import VirtualLoop, run_virtual

READY = b'{"state":"ready","load":{"at":1,"bound":8}}'
HELD = 5 * MOST_MOVED


class Held:
    """A request without an answer yet."""

    streams, begun, committed, quiet_since = True, False, False, 0.0

    def __init__(self, handle: ReplicaHandle, seen: Counter[str], turn: list[int]) -> None:
        self._handle, self._seen, self._turn = handle, seen, turn

    @property
    def held_back(self) -> bool:
        self._seen["looks"] += 1
        return False

    def expire(self, waited_s: float) -> None:
        assert waited_s > 0.0
        if not self._seen[f"turn {self._turn[0]}"]:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._seen[f"turn {self._turn[0]}"] += 1
        self._handle.relays.remove(self)  # type: ignore[arg-type]

    def _end_turn(self) -> None:
        self._turn[0] += 1


class Site:
    """Two replicas that are up, and the sweeps over them in virtual time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.health = ReplicaHealth(HealthCounters(), lambda: 0.5)
        self.replicas = [
            ReplicaHandle(ready_replica(name), 1.0, "", health=self.health) for name in ("one", "two")
        ]
        served = Mock(handles=self.replicas, leaving=[], health=self.health, engine=EngineKind.SIM)
        served.closes_at = math.inf
        served.name, served.is_unavailable.return_value = "m", False
        probes = ReplicaProber(Mock(models=(served,)), WorkerMetrics(), lambda: Deployment(()), "")
        self.sweeps = asyncio.create_task(probes.run())
        for each in self.replicas:
            each.count(READY, loop.time())


def test_the_requests_of_a_silent_replica_are_counted_once_and_moved_a_few_in_each_turn() -> None:
    async def main() -> None:
        site = Site()
        silent = site.replicas[0]
        seen: Counter[str] = Counter()
        turn = [0]
        for _ in range(HELD):
            silent.relays.add(Held(silent, seen, turn))  # type: ignore[arg-type]
        await asyncio.sleep(10.0)
        site.sweeps.cancel()
        assert not silent.relays
        looks = seen.pop("looks")
        assert looks < 50 * HELD, "each sweep looks at each once"
        assert sum(seen.values()) == HELD
        assert max(seen.values()) <= MOST_MOVED

    run_virtual(main)


@pytest.mark.parametrize(("paused_s", "silent_s", "ejected"), [(60.0, 2.0, 0), (60.0, 4.0, 1), (0.0, 4.0, 1)])
def test_a_pause_of_the_worker_itself_speaks_against_no_replica(
    paused_s: float, silent_s: float, ejected: int
) -> None:
    async def main() -> None:
        site = Site()
        site.replicas[0].relays.add(Mock(streams=True, held_back=False, begun=False, quiet_since=0.0))
        await asyncio.sleep(1.0)
        site.loop.pause(paused_s)
        await asyncio.sleep(silent_s)
        assert site.health.counters.ejections == ({"silence": 1} if ejected else {})
        site.sweeps.cancel()

    run_virtual(main)


def test_replicas_that_a_lost_controller_was_about_to_close_are_open_again_once_its_snapshot_is_stale() -> (
    None
):
    """They are idle, and what they were to make room for never comes."""

    async def main() -> None:
        queues = Queues()
        view = FleetView("", queues.metrics)
        switching = Model(name="alpha", runner=Runner.GENERATE, engine=EngineKind.EXTERNAL, closes_s=0.5)
        switching = structs.replace(switching, shape="other", generation=2)
        for at in (0.0, 1.0):  # the last one that comes
            view.take(FleetSnapshot(epoch=1.0, version=1, at=at, models=(switching,)), "controller", at)
        (served,) = view.models
        served.handles = queues.alpha.handles
        fleet = Mock(
            models=view.models, replica_changed=lambda each: queues.admission.replica_changed(each.name)
        )
        sweeps = asyncio.create_task(ReplicaProber(fleet, queues.metrics, lambda: Deployment(()), "").run())
        await asyncio.sleep(SNAPSHOT_STALE_S - 1.0)
        ticket = queues.arrive(served)
        asked = asyncio.create_task(ticket.wait())
        await asyncio.sleep(1.9)
        assert not asked.done()
        await asyncio.sleep(0.5)
        assert asked.done()
        assert served.closing_since == math.inf
        end(ticket)
        sweeps.cancel()

    run_virtual(main)
