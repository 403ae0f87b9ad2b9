"""Workloads that ServeGen generated and saved as CSV (github.com/alibaba/ServeGen)."""

from __future__ import annotations

from collections.abc import Iterator

from sim.arrival import Arrival
from sim.workload.traces.reader import Elapsed, Table

# Before them stands "request_id", after them "reason_ratio" for models that reason.
COLUMNS = ("timestamp", "input_tokens", "output_tokens")


def read(table: Table) -> Iterator[Arrival]:
    """The requests; one without input or output is refused."""
    elapsed: Elapsed[float] = Elapsed(table.lines, 1)
    for row in table:
        yield Arrival(
            at=elapsed.since(table.number(row, "timestamp"), row[table.at["timestamp"]]),
            input_tokens=table.tokens(row, "input_tokens"),
            output_tokens=table.tokens(row, "output_tokens"),
        )
