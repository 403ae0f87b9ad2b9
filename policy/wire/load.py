"""What a replica says of itself, a line at a time."""

from __future__ import annotations

import msgspec

from policy.engine.model import Timing
from policy.types import Load, ReplicaPhase

# Changes within this many seconds are sent as one line.
COALESCE_S = 0.02


class LoadLine(msgspec.Struct):
    """A line of a replica's ``/internal/load``; ``timing`` is in the first line of a stream alone.

    ``adapters`` are those that it has loaded, ``refused`` those that it could not load lately.
    """

    state: ReplicaPhase
    load: Load
    adapters: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    timing: Timing | None = None
    prefixes: tuple[int, ...] = ()


LOAD_LINE = msgspec.json.Decoder(LoadLine)
