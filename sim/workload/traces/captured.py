"""Tidegate's own trace format, :mod:`policy.wire.capture`, to and from arrivals."""

from __future__ import annotations

from collections.abc import Iterator

from policy.wire.capture import CaptureLine
from sim.arrival import Arrival
from sim.workload.traces.reader import Elapsed, Objects


def read(objects: Objects[CaptureLine]) -> Iterator[Arrival]:
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


def captured(arrival: Arrival) -> CaptureLine:
    """``arrival`` as a line."""
    return CaptureLine(**arrival._asdict())
