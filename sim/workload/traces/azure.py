"""Azure's inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from sim.arrival import Arrival
from sim.workload.traces.reader import Elapsed, Table

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

# 2023 has 100 ns and no zone, 2024 microseconds and one.
_INSTANT = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:Z|([+-])(\d\d):(\d\d))?", re.ASCII
)
_NS = 1_000_000_000


def read(table: Table) -> Iterator[Arrival]:
    """The requests; one without input or output is refused, as Azure's have both."""
    elapsed: Elapsed[int] = Elapsed(table.lines, _NS)
    for row in table:
        text = row[table.at["TIMESTAMP"]]
        instant = _nanoseconds(text)
        if instant is None:
            raise table.lines.refused(text, "an instant, as in 2023-11-16 18:15:46.6805900, in TIMESTAMP")
        yield Arrival(
            at=elapsed.since(instant, text),
            input_tokens=table.tokens(row, "ContextTokens"),
            output_tokens=table.tokens(row, "GeneratedTokens"),
        )


def _nanoseconds(text: str) -> int | None:
    match = _INSTANT.fullmatch(text)
    seconds = _seconds(match[1]) if match else None
    if match is None or seconds is None:
        return None
    if match[3]:
        zone = (int(match[4]) * 60 + int(match[5])) * 60
        seconds -= zone if match[3] == "+" else -zone
    return seconds * _NS + int((match[2] or "").ljust(9, "0"))


@lru_cache(maxsize=16)
def _seconds(text: str) -> int | None:
    """Seconds since 1970; many requests share theirs. ``None`` for a day or an hour that there is not."""
    try:
        return (datetime.fromisoformat(text).replace(tzinfo=UTC) - _EPOCH) // timedelta(seconds=1)
    except ValueError:
        return None


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
