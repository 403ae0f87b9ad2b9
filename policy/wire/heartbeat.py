"""What a replica host tells the controller, and what it is answered."""

from __future__ import annotations

import msgspec

from policy.types import Replica
from policy.wire.reports import EngineReport, PowerReport


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """A version of an adapter that a replica should have loaded: its ``name`` and whole ``digest``."""

    name: str
    digest: str


class AdapterUse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica did with one adapter since it last said so.

    ``name`` and whole ``digest`` as in :class:`AdapterRef`; ``requests`` that came for it, ``found`` of them
    while it was loaded, the ``loads`` that they or a plan needed, which took ``load_s`` seconds in all, and
    why the last one ``failed``. Requests that ended had it for ``busy_s`` seconds in all; ``waiting`` of them
    wait for a slot now.
    """

    name: str
    digest: str
    requests: int = 0
    found: int = 0
    loads: int = 0
    load_s: float = 0.0
    failed: str = ""
    busy_s: float = 0.0
    waiting: int = 0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a replica host tells the controller, twice a second and at each change."""

    replica: Replica
    uses: tuple[AdapterUse, ...] = ()
    engine: EngineReport | None = None
    power: PowerReport | None = None


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller answers a beat: the adapters to ``hold`` there, the most valuable first.

    ``awake`` is for the replica's bed: how many engines of each shape shall be. ``None`` says nothing: the
    replica goes on with what it was told last. ``leave`` is why the replica shall drain and be replaced.
    """

    hold: tuple[AdapterRef, ...] | None = None
    awake: dict[str, int] | None = None
    leave: str = ""
