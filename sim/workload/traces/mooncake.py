"""Mooncake's traces (github.com/kvcache-ai/Mooncake): milliseconds, lengths and hashes of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from policy.wire.capture import Hash, Tokens
from sim.arrival import Arrival
from sim.workload.traces.reader import Elapsed, Objects


class MooncakeLine(msgspec.Struct, frozen=True):
    """One request: ``timestamp`` in milliseconds, ``hash_ids`` of its blocks of 512 tokens."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[Hash, ...] = ()


def read(objects: Objects[MooncakeLine]) -> Iterator[Arrival]:
    """The requests; one without input or output is refused, as is one with more blocks than tokens fill."""
    elapsed: Elapsed[float] = Elapsed(objects.lines, 1000)
    for line in objects:
        yield Arrival(
            at=elapsed.since(line.timestamp, line.timestamp),
            input_tokens=line.input_length,
            output_tokens=line.output_length,
            blocks=objects.blocks(line.hash_ids, line.input_length),
        )
