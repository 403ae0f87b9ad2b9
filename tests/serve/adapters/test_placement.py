"""Replicas for which the cluster has no room: the status says what they wait for."""

from __future__ import annotations

from typing import Any

import msgspec

from serve.actuator.ray import unplaced
from tests.serve.plane import SMALL, Plane
from tests.serve.sim_documents import document, sim_model

# As Serve of Ray 2.60 says it.
SAID = (
    "Deployment 'replica' in application 'a' has 1 replicas that have taken more than 30s to be scheduled. "
    "This may be due to waiting for the cluster to auto-scale or for a runtime environment to be installed. "
    'Resources required for each replica: {"CPU": 1.0, "GPU": 4.0}, '
    'total resources available: {"CPU": 0.5}. Use `ray status` for more details.'
)


def deployment(state: str, node_id: str | None, message: str = SAID) -> dict[str, Any]:
    return {
        "message": message,
        "replicas": [{"state": "RUNNING", "node_id": "n"}, {"state": state, "node_id": node_id}],
    }


def test_what_serve_says_of_a_replica_without_a_node() -> None:
    assert unplaced(deployment("STARTING", None)) == (
        'no node has room for 1 of {"CPU": 1.0, "GPU": 4.0}: {"CPU": 0.5} is free'
    )


def test_who_has_a_node_or_leaves_waits_for_none() -> None:
    # Serve leaves what it said last where it is until it has something else to say.
    assert not unplaced(deployment("STARTING", "n"))
    assert not unplaced(deployment("STOPPING", None))
    assert not unplaced(deployment("STARTING", None, ""))


async def test_the_status_says_what_is_waited_for(plane: Plane) -> None:
    await plane.up(document(sim_model()))
    plane.cluster.slow = True
    plane.controller.scale("m", 2)
    await plane.ticks(2)
    plane.cluster.held[SMALL] = msgspec.structs.replace(plane.cluster.held[SMALL], waits="no room")
    await plane.ticks(1)
    assert plane.note() == "no room"
