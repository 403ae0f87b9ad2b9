"""The lines of a replica's load stream, ``GET /internal/load``."""

from __future__ import annotations

import msgspec

from policy.engine.performance_model import Timing
from policy.types import Load, ReplicaPhase

# Changes within this many seconds are sent as one line.
COALESCE_S = 0.02


class LoadLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line: the replica's phase and load.

    ``adapters`` are the loaded ones, ``refused`` those whose load failed recently. ``timing`` is only in the
    first line of a stream; ``prefixes`` are the hashes of the requests that arrived since the line before.
    """

    state: ReplicaPhase
    load: Load
    adapters: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    timing: Timing | None = None
    prefixes: tuple[int, ...] = ()


LOAD_LINE = msgspec.json.Decoder(LoadLine)
