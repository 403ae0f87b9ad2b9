"""Events of a worker's view of the replicas, for its listeners."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

from policy.routing.engine_prefix_index import PrefixIndexUpdate
from policy.wire.load_stream import LoadReport


def _ignore(*_: object) -> None:
    """The event has no listener."""


class FleetListeners(NamedTuple):
    """Events of replicas and their listeners, whose first argument is the model's name.

    ``changed``: a replica may take more requests. ``unavailable``: no replica is up and none is starting, or
    the model was removed.
    ``prefixes``: this line of the load stream of the replica with this key has news of prefixes.
    ``cached``: the events of the external server with this key say what its cache holds.
    ``forgotten``: its cache is empty, or not known any more. ``adapters``: those that it has loaded, and
    those that it could not load lately: all, or the newest. ``unloadable``: the latter alone. ``died``: the
    replica with this key.
    """

    changed: Callable[[str], None] = _ignore
    unavailable: Callable[[str], None] = _ignore
    prefixes: Callable[[str, int, LoadReport], None] = _ignore
    cached: Callable[[str, int, PrefixIndexUpdate], None] = _ignore
    forgotten: Callable[[str, int], None] = _ignore
    adapters: Callable[[str, int, Set[str], Set[str]], None] = _ignore
    unloadable: Callable[[str, Set[str]], None] = _ignore
    died: Callable[[str, int], None] = _ignore


NO_EVENTS = FleetListeners()
