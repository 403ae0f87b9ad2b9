"""Our own format: lengths, instants, names and block hashes of what a gateway served, never text.

The first line is a :class:`CaptureHeader`, each one after it a :class:`CapturedLine`, all of them JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sim.arrival import Arrival
from sim.workload.traces.from_zero import Elapsed
from sim.workload.traces.reader import Hash, Objects, Tokens


class CaptureHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file is: the version of this format, and how many tokens a block has."""

    tidegate: Literal["capture"]
    version: Literal[1]
    block_tokens: Literal[512]


HEADER = CaptureHeader(tidegate="capture", version=1, block_tokens=512)


class CapturedLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request, as :class:`sim.arrival.Arrival` has it; ``at`` in seconds from any instant."""

    at: Annotated[float, Meta(ge=0)]
    input_tokens: Tokens
    output_tokens: Tokens
    model: str = ""
    adapter: str = ""
    tenant: str = ""
    session: Annotated[int, Meta(ge=0)] = 0
    blocks: tuple[Hash, ...] = ()


def read(objects: Objects[CapturedLine]) -> Iterator[Arrival]:
    """The requests below the header."""
    elapsed: Elapsed[float] = Elapsed(objects.lines, 1)
    for line in objects:
        yield Arrival(
            at=elapsed.since(line.at, line.at),
            input_tokens=line.input_tokens,
            output_tokens=line.output_tokens,
            model=line.model,
            adapter=line.adapter,
            tenant=line.tenant,
            session=line.session,
            blocks=objects.blocks(line.blocks, line.input_tokens),
        )


def captured(arrival: Arrival) -> CapturedLine:
    """``arrival`` as a line."""
    return CapturedLine(**arrival._asdict())
