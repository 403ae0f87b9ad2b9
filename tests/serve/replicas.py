"""Replicas as heartbeats report them."""

from __future__ import annotations

from typing import Any

import msgspec

from policy.types import Replica, ReplicaLoad, ReplicaPhase

READY = Replica(
    id="r1",
    model="m",
    shape="small",
    generation=1,
    state=ReplicaPhase.READY,
    load=ReplicaLoad(at=0.0, bound=8),
)


def replica(name: str = "r1", **over: Any) -> Replica:
    """A ready replica of the shape ``small`` of ``m``."""
    return msgspec.structs.replace(READY, id=name, **over)
