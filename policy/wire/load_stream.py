"""A replica's own routes: the lines of its load stream, ``GET /internal/load``, and its profile."""

from __future__ import annotations

import msgspec

from policy.engine.performance_model import Timing
from policy.types import ReplicaLoad, ReplicaPhase

# A trace by the engine's profiler: `POST`, with the seconds to record.
PROFILE = "/internal/profile"
# Changes within this many seconds are sent as one line.
COALESCE_S = 0.02


class CachedPrefix(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A prefix that a gateway named, and its tokens in the KV cache.

    A prompt that shares it, and nothing deeper that is held, finds ``tokens`` in device memory and further
    ``host_tokens`` in host memory.
    """

    hash: int
    tokens: int
    host_tokens: int = 0


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line: the replica's phase and load.

    ``adapters`` are the loaded ones, ``refused`` those whose load failed recently. ``timing`` is only in the
    first line of a stream; ``prefixes`` are the hashes of the requests that arrived since the line before.

    Of an engine with KV events: the prefixes that are now ``held``, and those that are ``gone``, with the
    tokens that they have once they are computed again. After ``reset`` no prefix is held but those of this
    line, and every later change is reported.
    """

    state: ReplicaPhase
    load: ReplicaLoad
    adapters: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    timing: Timing | None = None
    prefixes: tuple[int, ...] = ()
    reset: bool = False
    held: tuple[CachedPrefix, ...] = ()
    gone: tuple[CachedPrefix, ...] = ()


LOAD_LINE = msgspec.json.Decoder(LoadReport)
